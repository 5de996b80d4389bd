/* What lock, checkpoint, restore and unlock do to the state of state.h, for the stand-ins of the driver and of the tool.
 *
 * States, and what each call needs and leaves, are those of NVIDIA's cuda.h 12.8 (CUprocessState, cuCheckpointProcess*);
 * texts are those of its cuGetErrorString. Faults and settings (VALUE of a fault: always, once, every:N):
 *
 *   driver=550|555|570|580|610   which driver this is; 580 unless set
 *   context-bytes=N              what a context takes on its device; 0 unless set
 *   lock-fails=VALUE             "initialization error", as a live process shows it now and then
 *   lock-hangs=always            a lock does not end while this is set, whatever its timeout
 *   siblings-hang=always         of processes with the flag nccl: a lock ends when all of them are being locked, and other
 *                                calls on one that is not hang until then, or until the others run again
 *                                (NVIDIA/cuda-checkpoint issue 30)
 *   silent-while-stopped=always  a stopped process does not tell its state
 *   copy-takes=SECONDS           a checkpoint or restore takes that long
 *   checkpoint-fails=VALUE
 *   checkpoint-spoils=VALUE      it fails, and the process is in the state failed: the README of cuda-checkpoint promises no
 *                                good state after an error
 *   checkpoint-then=NAME:VALUE   one that worked sets this fault
 *   checkpoint-frees=nothing|half|late:SECONDS   it succeeds all the same
 *   restore-lands=UUID           all that comes back comes back on this device
 *   restore-fails=VALUE
 *   parallel-deadlocks=always    a checkpoint or restore that begins beside another one does not end, nor does that one
 *   unlock-fails=VALUE
 *   get-state-fails=VALUE
 *   slow=PID                     the state of this process takes 0.2 s
 *   no-restore-thread=VALUE      no process shows one
 *   persistence=0                for the stand-in of NVML: persistence mode is off
 *   poisoned=1                   set by a restore without room on the device: no restore works from then on
 *                                (issue 44 there, where the process itself never comes back)
 *
 * A call that meets another one at work on the same process is written down in the file overlaps.
 * Each device map that a restore was given is written down in the file maps.
 * An action on a stopped process waits until that runs: the driver does its part in a thread of it (the restore thread).
 * A process with the flag uvm (or ipc, before driver 610) can't be checkpointed: 304.
 */
#ifndef STUB_OPERATIONS_H
#define STUB_OPERATIONS_H

#include "state.h"

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    OPERATING_SYSTEM = 304,
    ILLEGAL_STATE = 401,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
    UNKNOWN = 999
};

static inline const char *stub_text(int code) {
    switch (code) {
    case OK: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case NOT_INITIALIZED: return "initialization error";
    case OPERATING_SYSTEM: return "OS call failed or operation not supported on this OS";
    case ILLEGAL_STATE: return "the operation cannot be performed in the present state";
    case NOT_READY: return "device not ready";
    case NOT_SUPPORTED: return "operation not supported";
    default: return "unknown error";
    }
}

static inline u64 stub_driver(void) { return stub_number("driver", 580); }

static inline int stub_is_set(const char *name) {
    char value[64];
    return stub_fault(name, value, sizeof value);
}

static inline void stub_pause(void) { usleep(5000); }

/* A thread of the process has to run for it. 1 when it still does not at `until`. */
static inline int stub_wait_for_thread(int pid, double until) {
    char path[64], text[1024], state = 'T';
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    while (state == 'T' && (!until || stub_now() < until)) {
        FILE *file = fopen(path, "r");
        size_t size = file ? fread(text, 1, sizeof text - 1, file) : 0;
        if (file) fclose(file);
        text[size] = 0;
        char *rest = strrchr(text, ')');
        if (!rest || sscanf(rest + 2, "%c", &state) != 1) return 0;
        if (state == 'T') stub_pause();
    }
    return state == 'T';
}

/* Take the lock and read a process. Close *lock whatever comes back. */
static inline int stub_open(int pid, int *lock, Proc *proc) {
    *lock = stub_lock();
    return stub_proc(pid, proc) ? OK : NOT_INITIALIZED;
}

static inline int stub_close(int lock, int code) {
    stub_unlock(lock);
    return code;
}

static inline int stub_is_running(const Proc *proc) { return !strcmp(proc->state, "running"); }

/* Whether a call on this process has to wait: a sibling is locked, or is being locked, and it is not. */
static inline int stub_waits(const Proc *proc) {
    static Proc others[MOST];
    if (!stub_is_set("siblings-hang") || !strstr(proc->flags, "nccl") || !stub_is_running(proc) || proc->locking)
        return 0;
    for (int i = 0, count = stub_procs(others); i < count; i++)
        if (strstr(others[i].flags, "nccl") && (others[i].locking || !stub_is_running(&others[i]))) return 1;
    return 0;
}

/* Whether each sibling is locked or being locked. */
static inline int stub_all_locking(const Proc *proc) {
    static Proc others[MOST];
    if (!stub_is_set("siblings-hang") || !strstr(proc->flags, "nccl")) return 1;
    for (int i = 0, count = stub_procs(others); i < count; i++)
        if (strstr(others[i].flags, "nccl") && stub_is_running(&others[i]) && !others[i].locking) return 0;
    return 1;
}

static inline int stub_get_state(int pid, char *out, size_t size) {
    Proc proc;
    if (stub_is_set("silent-while-stopped")) stub_wait_for_thread(pid, 0);
    if (stub_number("slow", 0) == (u64)pid) usleep(200000);
    for (int lock;; stub_pause()) {
        int code = stub_open(pid, &lock, &proc);
        if (code || stub_strikes("get-state-fails")) return stub_close(lock, code ? code : UNKNOWN);
        if (!stub_waits(&proc)) {
            snprintf(out, size, "%s", proc.state);
            return stub_close(lock, OK);
        }
        stub_unlock(lock);
    }
}

static inline int stub_lock_process(int pid, u64 timeout_ms) {
    Proc proc;
    int lock, code = stub_open(pid, &lock, &proc);
    if (!code && !stub_is_running(&proc)) code = ILLEGAL_STATE;
    if (!code && stub_strikes("lock-fails")) code = NOT_INITIALIZED;
    if (code) return stub_close(lock, code);
    proc.locking = 1;
    stub_save(&proc);
    stub_unlock(lock);
    double until = stub_now() + timeout_ms / 1000.0;
    for (int stands = stub_wait_for_thread(pid, timeout_ms ? until : 0);; stub_pause()) {
        if ((code = stub_open(pid, &lock, &proc))) return stub_close(lock, code);
        int hangs = stub_is_set("lock-hangs");
        int overdue = timeout_ms && stub_now() > until;
        if (!hangs && (overdue || stub_all_locking(&proc))) {
            proc.locking = 0;
            if (!stands && (stub_all_locking(&proc) || !overdue)) snprintf(proc.state, sizeof proc.state, "locked");
            stub_save(&proc);
            return stub_close(lock, strcmp(proc.state, "locked") ? NOT_READY : OK);
        }
        stub_unlock(lock);
    }
}

/* Device memory is a file: it moves by getting another name. */
static inline void stub_move_content(const Proc *proc, const char *from, const char *to) {
    char old[512], new[512];
    for (int i = 0; i < proc->allocs; i++) {
        stub_path(old, sizeof old, "memory/%d-%llu-%llu%s", proc->pid, proc->start, proc->alloc[i].address, from);
        stub_path(new, sizeof new, "memory/%d-%llu-%llu%s", proc->pid, proc->start, proc->alloc[i].address, to);
        rename(old, new);
    }
}

static inline void stub_write_down(const char *name, const char *text) {
    char path[512];
    stub_path(path, sizeof path, "%s", name);
    FILE *file = fopen(path, "a");
    if (!file) return;
    fprintf(file, "%s\n", text);
    fclose(file);
}

/* Marks that a copy is under way; with parallel-deadlocks a second one stops both while the fault is set. */
static inline void stub_begin_copy(void) {
    char path[512], seconds[64];
    stub_path(path, sizeof path, "copying");
    if (stub_fault("copy-takes", seconds, sizeof seconds)) usleep(strtod(seconds, NULL) * 1e6);
    if (!stub_is_set("parallel-deadlocks")) return;
    FILE *file = fopen(path, "a");
    if (file) {
        fputs(".", file);
        fclose(file);
    }
    usleep(30000); /* long enough for another one to come */
    for (int others = 1; others && stub_is_set("parallel-deadlocks");) {
        file = fopen(path, "r");
        others = file && fgetc(file) != EOF && fgetc(file) != EOF;
        if (file) fclose(file);
        if (others) stub_pause();
    }
    unlink(path);
}

static inline void stub_keep(Proc *proc, const char *how) {
    proc->kepts = 0;
    double late = strncmp(how, "late:", 5) ? 0 : stub_now() + strtod(how + 5, NULL);
    for (int i = 0; i < proc->allocs; i++) {
        Block *kept = &proc->kept[proc->kepts++];
        *kept = proc->alloc[i];
        kept->until = late;
        if (!strcmp(how, "half")) kept->bytes /= 2;
    }
}

static inline int stub_checkpoint(int pid) {
    Proc proc;
    char how[64], *value;
    stub_wait_for_thread(pid, 0);
    stub_begin_copy();
    int lock, code = stub_open(pid, &lock, &proc);
    if (!code && strcmp(proc.state, "locked")) code = ILLEGAL_STATE;
    if (!code && stub_strikes("checkpoint-fails")) code = UNKNOWN;
    if (!code && stub_strikes("checkpoint-spoils")) {
        snprintf(proc.state, sizeof proc.state, "failed");
        stub_save(&proc);
        code = UNKNOWN;
    }
    if (!code && (strstr(proc.flags, "uvm") || (stub_driver() < 610 && strstr(proc.flags, "ipc")))) code = OPERATING_SYSTEM;
    if (code) return stub_close(lock, code);
    snprintf(proc.state, sizeof proc.state, "checkpointed");
    for (int i = 0; i < proc.allocs; i++) proc.host += proc.alloc[i].bytes;
    if (stub_fault("checkpoint-frees", how, sizeof how)) stub_keep(&proc, how);
    stub_move_content(&proc, "", ".out");
    stub_save(&proc);
    if (stub_fault("checkpoint-then", how, sizeof how) && (value = strchr(how, ':'))) {
        *value++ = 0;
        stub_set_fault(how, value);
        stub_set_fault("checkpoint-then", NULL);
    }
    return stub_close(lock, OK);
}

static inline u64 stub_total(const char *uuid) {
    Device devices[MOST];
    for (int i = 0, count = stub_devices(devices); i < count; i++)
        if (!strcmp(devices[i].uuid, uuid)) return devices[i].total;
    return 0;
}

/* The device map: OLD=NEW,... over all devices, each exactly once on either side. "" means none. */
static inline int stub_map(const char *map, const char *old, char *out) {
    char text[MOST * 2 * NAME_LENGTH], *rest = text;
    snprintf(text, sizeof text, "%s", map);
    for (char *pair; (pair = strsep(&rest, ","));) {
        char *new = strchr(pair, '=');
        if (!new) return 0;
        *new++ = 0;
        if (!strcmp(pair, old)) {
            snprintf(out, NAME_LENGTH, "%s", new);
            return 1;
        }
    }
    return 0;
}

static inline int stub_map_is_right(const char *map) {
    Device devices[MOST];
    char seen[MOST][NAME_LENGTH];
    int count = stub_devices(devices), pairs = 1;
    for (const char *at = map; *at; at++) pairs += *at == ',';
    if (pairs != count) return 0;
    for (int i = 0; i < count; i++) {
        if (!stub_map(map, devices[i].uuid, seen[i]) || !stub_total(seen[i])) return 0;
        for (int j = 0; j < i; j++)
            if (!strcmp(seen[i], seen[j])) return 0;
    }
    return 1;
}

static inline int stub_land(Proc *proc, const char *map) {
    char elsewhere[NAME_LENGTH] = "";
    stub_fault("restore-lands", elsewhere, sizeof elsewhere);
    for (int i = 0; i < proc->allocs + proc->contexts; i++) {
        Block *block = i < proc->allocs ? &proc->alloc[i] : &proc->context[i - proc->allocs];
        char old[NAME_LENGTH];
        snprintf(old, sizeof old, "%s", block->uuid);
        if (*map) stub_map(map, old, block->uuid);
        if (*elsewhere) snprintf(block->uuid, sizeof block->uuid, "%s", elsewhere);
    }
    for (int i = 0; i < proc->allocs; i++) { /* what it takes in all must be free there */
        const char *uuid = proc->alloc[i].uuid;
        u64 need = stub_sum(proc->alloc, proc->allocs, uuid) + stub_sum(proc->context, proc->contexts, uuid);
        if (need + stub_used(uuid) > stub_total(uuid)) return OUT_OF_MEMORY;
    }
    return OK;
}

static inline int stub_restore_thread(int pid, int *out) {
    Proc proc;
    int lock, code = stub_open(pid, &lock, &proc);
    if (!code && stub_strikes("no-restore-thread")) code = NOT_INITIALIZED;
    *out = pid; /* any thread of it would do */
    return stub_close(lock, code);
}

static inline int stub_restore(int pid, const char *map) {
    Proc proc;
    stub_wait_for_thread(pid, 0);
    stub_begin_copy();
    int lock, code = stub_open(pid, &lock, &proc);
    if (!code && !stub_is_out(&proc)) code = ILLEGAL_STATE;
    if (*map) stub_write_down("maps", map);
    if (!code && *map && !stub_map_is_right(map)) code = INVALID_VALUE;
    if (!code && stub_is_set("poisoned")) code = OPERATING_SYSTEM;
    if (!code && stub_strikes("restore-fails")) code = UNKNOWN;
    if (code) return stub_close(lock, code);
    proc.kepts = 0; /* what it kept is its own to use again */
    stub_save(&proc);
    if ((code = stub_land(&proc, map))) {
        stub_set_fault("poisoned", "1");
        return stub_close(lock, code);
    }
    snprintf(proc.state, sizeof proc.state, "locked");
    proc.host = 0;
    stub_move_content(&proc, ".out", "");
    stub_save(&proc);
    return stub_close(lock, OK);
}

static inline int stub_unlock_process(int pid) {
    Proc proc;
    stub_wait_for_thread(pid, 0);
    int lock, code = stub_open(pid, &lock, &proc);
    if (!code && strcmp(proc.state, "locked")) code = ILLEGAL_STATE;
    if (!code && stub_strikes("unlock-fails")) code = UNKNOWN;
    if (!code) {
        snprintf(proc.state, sizeof proc.state, "running");
        stub_save(&proc);
    }
    return stub_close(lock, code);
}

/* Holds the number of a process for a call, and writes down if it was taken. It goes with this program. */
static inline void stub_come_in(int pid, const char *what) {
    char path[512], text[128];
    stub_path(path, sizeof path, "calls/%d", pid);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    snprintf(text, sizeof text, "%s %d", what, pid);
    if (file >= 0 && flock(file, LOCK_EX | LOCK_NB)) stub_write_down("overlaps", text);
}

#endif
