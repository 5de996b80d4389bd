/* Stand-in for NVIDIA's cuda-checkpoint: its flags, what it prints, its error texts; on the state of state.h.
 *
 * Mirrors: the help text and the flags in the README of github.com/NVIDIA/cuda-checkpoint as of 550.54 (--toggle only),
 * 570.86.10 and 580; the error texts in that repository's issues. The real tool only passes on to the driver, so which
 * driver it is (driver=550|555|570|580|610 in the node's faults) decides what works.
 * No accelerator is involved.
 */
#include "operations.h"

static void help(void) {
    u64 driver = stub_driver();
    printf("CUDA checkpoint and restore utility.\nVersion %llu.00 (stand-in, no accelerator is involved).\n\n", driver);
    if (driver < 555) {
        printf("Toggles the state of CUDA within a process between suspended and running\n\n"
               "--toggle --pid <pid>\n\tToggle the state of CUDA in the specified process\n\n--help\n");
        return;
    }
    printf("Operations:\n");
    if (driver >= 570) printf("--get-state --pid <pid>\n\tPrints the current checkpoint state of the process\n\n");
    printf("--action lock | checkpoint | restore | unlock --pid <pid>%s%s\n\tPerforms the specified action on <pid>.\n\n",
           driver >= 570 ? " [--timeout <ms>]" : "", driver >= 580 ? " [--device-map <uuids>]" : "");
    printf("--toggle --pid <pid>\n\tToggles the CUDA state between the running and checkpointed states\n\n"
           "--get-restore-tid --pid <pid>\n\tRetrieves the CUDA restore thread ID of the process\n\n"
           "Options:\n--pid|-p <pid>\n\tThe pid upon which to perform the operation\n\n");
    if (driver >= 570) printf("--timeout|-t <timeout>\n\tOptional timeout for the lock action in milliseconds\n\n");
    if (driver >= 580) printf("--device-map|-d oldUuid=newUuid,...\n\tOptionally remap devices during restore.\n\n");
    printf("--help|-h\n\tPrint this help message\n");
}

static int toggle(int pid) {
    char state[16] = "";
    int code = stub_get_state(pid, state, sizeof state);
    if (code) return code;
    if (!strcmp(state, "running")) {
        if ((code = stub_lock_process(pid, 10000))) return code;
        if ((code = stub_checkpoint(pid))) stub_unlock_process(pid);
        return code;
    }
    if (!strcmp(state, "checkpointed") && (code = stub_restore(pid, ""))) return code;
    return stub_unlock_process(pid);
}

static int act(const char *action, int pid, u64 timeout, const char *map) {
    if (!strcmp(action, "lock")) return stub_lock_process(pid, timeout);
    if (!strcmp(action, "checkpoint")) return stub_checkpoint(pid);
    if (!strcmp(action, "restore")) return stub_restore(pid, map);
    return stub_unlock_process(pid);
}

static int usage(const char *why) {
    fprintf(stderr, "%s\n", why);
    return 1;
}

static int complain(int code, const char *format, int pid) {
    if (code) {
        fprintf(stderr, format, pid, stub_text(code));
        fputs("\n", stderr);
    }
    return code ? 1 : 0;
}

int main(int count, char **words) {
    const char *action = "", *operation = "", *map = "";
    int pid = 0;
    u64 timeout = 0, driver = stub_driver();
    if (count < 2) return help(), 1;
    for (int i = 1; i < count; i++) {
        const char *word = words[i], *next = i + 1 < count ? words[i + 1] : "";
        if (!strcmp(word, "--help") || !strcmp(word, "-h")) return help(), 0;
        if (!strcmp(word, "--toggle") || (driver >= 555 && !strcmp(word, "--get-restore-tid")) ||
            (driver >= 570 && !strcmp(word, "--get-state"))) {
            operation = word;
            continue;
        }
        if (!strcmp(word, "--pid") || !strcmp(word, "-p")) pid = atoi(next);
        else if (driver >= 555 && !strcmp(word, "--action")) action = operation = next;
        else if (driver >= 570 && (!strcmp(word, "--timeout") || !strcmp(word, "-t"))) timeout = strtoull(next, NULL, 10);
        else if (driver >= 580 && (!strcmp(word, "--device-map") || !strcmp(word, "-d"))) map = next;
        else return usage("Unrecognized option");
        i++;
    }
    if (pid <= 0) return usage("A valid pid must be specified");
    stub_come_in(pid, operation);
    if (!strcmp(operation, "--get-state")) {
        char state[16] = "";
        int code = stub_get_state(pid, state, sizeof state);
        if (!code) printf("%s\n", state);
        return complain(code, "Error getting process state for process ID %d: \"%s\"", pid);
    }
    if (!strcmp(operation, "--get-restore-tid")) {
        int thread, code = stub_restore_thread(pid, &thread);
        if (!code) printf("%d\n", thread);
        return complain(code, "Could not find restore thread for process ID %d: \"%s\"", pid);
    }
    if (!strcmp(operation, "--toggle")) return complain(toggle(pid), "Error toggling CUDA in process ID %d: \"%s\"", pid);
    if (strcmp(action, "lock") && strcmp(action, "checkpoint") && strcmp(action, "restore") && strcmp(action, "unlock"))
        return usage("An operation must be specified");
    char format[64];
    snprintf(format, sizeof format, "Could not %s on process ID %%d: \"%%s\"", action);
    return complain(act(action, pid, timeout, map), format, pid);
}
