/* The state of a stand-in for a node with NVIDIA GPUs: plain text files in the folder $STUB_GPU_DIR.
 *
 *   devices           a line a device: UUID TOTAL_BYTES NAME [UUID of the GPU that a MIG instance is a part of]
 *   procs/PID-START   a process with a CUDA context; START is field 22 of /proc/PID/stat. Lines:
 *                       state running|locked|checkpointed|failed
 *                       context UUID BYTES          what the context itself takes there
 *                       alloc UUID BYTES [ADDRESS]  one allocation; its content is in memory/PID-START-ADDRESS
 *                       kept UUID BYTES [UNTIL]     on the device in spite of "checkpointed", until monotonic seconds
 *                       host BYTES                  held for it in host memory
 *                       flags [uvm] [ipc] [nccl]
 *                       util PERCENT
 *                       locking                     a lock of it is under way
 *   faults            NAME=VALUE lines: what goes wrong, and which driver this is; see operations.h
 *   lock              flock it to change anything
 *
 * A file of a process that has ended counts for nothing, as memory goes with the process on a GPU.
 * No accelerator is involved anywhere. The programs beside this file are stand-ins for NVIDIA's.
 */
#ifndef STUB_STATE_H
#define STUB_STATE_H

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#define MOST 64 /* devices, processes, and blocks of one process */
#define NAME_LENGTH 96

typedef unsigned long long u64;

typedef struct {
    char uuid[NAME_LENGTH], name[NAME_LENGTH], parent[NAME_LENGTH]; /* parent: "" unless it is a MIG instance */
    u64 total;
} Device;

typedef struct {
    char uuid[NAME_LENGTH];
    u64 bytes, address; /* address: 0 where there is none */
    double until;       /* of what is kept: 0 means for good */
} Block;

typedef struct {
    int pid, locking, util;
    u64 start, host;
    char state[16], flags[64];
    int contexts, allocs, kepts;
    Block context[MOST], alloc[MOST], kept[MOST];
} Proc;

static inline void stub_path(char *out, size_t size, const char *format, ...) {
    const char *dir = getenv("STUB_GPU_DIR");
    int used = snprintf(out, size, "%s/", dir ? dir : "/nonexistent");
    va_list words;
    va_start(words, format);
    vsnprintf(out + used, size - used, format, words);
    va_end(words);
}

static inline double stub_now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

/* A descriptor to close with stub_unlock; -1 without a node. */
static inline int stub_lock(void) {
    char path[512];
    stub_path(path, sizeof path, "lock");
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd >= 0) flock(fd, LOCK_EX);
    return fd;
}

static inline void stub_unlock(int fd) {
    if (fd >= 0) close(fd);
}

/* Start time of a running process; 0 when there is none. A zombie has ended. */
static inline u64 stub_start_time(int pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    size_t size = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[size] = 0;
    char *rest = strrchr(text, ')'), state = 0;
    u64 start = 0;
    if (!rest) return 0;
    sscanf(rest + 2,
           "%c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state, &start);
    return state == 'Z' || state == 'X' ? 0 : start;
}

static inline int stub_devices(Device *out) {
    char path[512], line[512];
    int count = 0;
    stub_path(path, sizeof path, "devices");
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    while (count < MOST && fgets(line, sizeof line, file)) {
        Device *each = &out[count];
        memset(each, 0, sizeof *each);
        if (sscanf(line, "%95s %llu %95s %95s", each->uuid, &each->total, each->name, each->parent) >= 3) count++;
    }
    fclose(file);
    return count;
}

static inline void stub_read_block(Block *blocks, int *count, const char *line) {
    Block *block = &blocks[*count];
    memset(block, 0, sizeof *block);
    if (*count < MOST && sscanf(line, "%*s %95s %llu", block->uuid, &block->bytes) == 2) (*count)++;
}

/* Read what is known of a process; 0 when it has ended or has no context. */
static inline int stub_proc(int pid, Proc *out) {
    char path[512], line[512], word[32];
    memset(out, 0, sizeof *out);
    out->pid = pid;
    if (!(out->start = stub_start_time(pid))) return 0;
    stub_path(path, sizeof path, "procs/%d-%llu", pid, out->start);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%31s", word) != 1) continue;
        if (!strcmp(word, "state")) sscanf(line, "%*s %15s", out->state);
        if (!strcmp(word, "host")) sscanf(line, "%*s %llu", &out->host);
        if (!strcmp(word, "util")) sscanf(line, "%*s %d", &out->util);
        if (!strcmp(word, "flags")) sscanf(line, "%*s %63[^\n]", out->flags);
        if (!strcmp(word, "locking")) out->locking = 1;
        if (!strcmp(word, "context")) stub_read_block(out->context, &out->contexts, line);
        if (!strcmp(word, "alloc")) {
            stub_read_block(out->alloc, &out->allocs, line);
            if (out->allocs) sscanf(line, "%*s %*s %*s %llu", &out->alloc[out->allocs - 1].address);
        }
        if (!strcmp(word, "kept")) {
            stub_read_block(out->kept, &out->kepts, line);
            if (out->kepts) sscanf(line, "%*s %*s %*s %lf", &out->kept[out->kepts - 1].until);
        }
    }
    fclose(file);
    return 1;
}

static inline void stub_save(const Proc *proc) {
    char path[512], draft[512];
    stub_path(path, sizeof path, "procs/%d-%llu", proc->pid, proc->start);
    stub_path(draft, sizeof draft, "procs/.%d-%llu", proc->pid, proc->start);
    FILE *file = fopen(draft, "w");
    if (!file) return;
    fprintf(file, "state %s\nhost %llu\nutil %d\nflags %s\n%s", proc->state, proc->host, proc->util, proc->flags,
            proc->locking ? "locking\n" : "");
    for (int i = 0; i < proc->contexts; i++)
        fprintf(file, "context %s %llu\n", proc->context[i].uuid, proc->context[i].bytes);
    for (int i = 0; i < proc->allocs; i++)
        fprintf(file, "alloc %s %llu %llu\n", proc->alloc[i].uuid, proc->alloc[i].bytes, proc->alloc[i].address);
    for (int i = 0; i < proc->kepts; i++)
        fprintf(file, "kept %s %llu %.3f\n", proc->kept[i].uuid, proc->kept[i].bytes, proc->kept[i].until);
    fclose(file);
    rename(draft, path);
}

/* All processes that run and have a context. */
static inline int stub_procs(Proc *out) {
    char path[512];
    int count = 0;
    stub_path(path, sizeof path, "procs");
    DIR *folder = opendir(path);
    if (!folder) return 0;
    for (struct dirent *entry; count < MOST && (entry = readdir(folder));) {
        int pid = 0;
        u64 start = 0;
        if (sscanf(entry->d_name, "%d-%llu", &pid, &start) == 2 && stub_start_time(pid) == start)
            count += stub_proc(pid, &out[count]);
    }
    closedir(folder);
    return count;
}

static inline u64 stub_sum(const Block *blocks, int count, const char *uuid) {
    u64 sum = 0;
    for (int i = 0; i < count; i++)
        if (!strcmp(blocks[i].uuid, uuid) && (!blocks[i].until || blocks[i].until > stub_now())) sum += blocks[i].bytes;
    return sum;
}

static inline int stub_is_out(const Proc *proc) { return !strcmp(proc->state, "checkpointed"); }

/* Bytes that a process takes on a device now. */
static inline u64 stub_bytes_on(const Proc *proc, const char *uuid) {
    if (stub_is_out(proc)) return stub_sum(proc->kept, proc->kepts, uuid);
    return stub_sum(proc->context, proc->contexts, uuid) + stub_sum(proc->alloc, proc->allocs, uuid);
}

/* Whether the driver lists a process as one that computes on a device: it vanishes while it is checkpointed. */
static inline int stub_is_on(const Proc *proc, const char *uuid) {
    if (stub_is_out(proc)) return stub_bytes_on(proc, uuid) > 0;
    for (int i = 0; i < proc->contexts; i++)
        if (!strcmp(proc->context[i].uuid, uuid)) return 1;
    return stub_sum(proc->alloc, proc->allocs, uuid) > 0;
}

static inline u64 stub_used(const char *uuid) {
    static __thread Proc procs[MOST];
    u64 used = 0;
    for (int i = 0, count = stub_procs(procs); i < count; i++) used += stub_bytes_on(&procs[i], uuid);
    return used;
}

/* Value of a fault or setting; 0 when it is not there. */
static inline int stub_fault(const char *name, char *out, size_t size) {
    char path[512], line[256];
    int found = 0;
    stub_path(path, sizeof path, "faults");
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    while (fgets(line, sizeof line, file)) {
        char *value = strchr(line, '=');
        if (!value) continue;
        *value++ = 0;
        if (strcmp(line, name)) continue;
        value[strcspn(value, "\n")] = 0;
        snprintf(out, size, "%s", value);
        found = 1;
    }
    fclose(file);
    return found;
}

/* Set a fault, or take it away with NULL. */
static inline void stub_set_fault(const char *name, const char *value) {
    char path[512], draft[512], line[256];
    stub_path(path, sizeof path, "faults");
    stub_path(draft, sizeof draft, ".faults");
    FILE *old = fopen(path, "r"), *file = fopen(draft, "w");
    if (!file) {
        if (old) fclose(old);
        return;
    }
    size_t length = strlen(name);
    while (old && fgets(line, sizeof line, old))
        if (strncmp(line, name, length) || line[length] != '=') fputs(line, file);
    if (old) fclose(old);
    if (value) fprintf(file, "%s=%s\n", name, value);
    fclose(file);
    rename(draft, path);
}

/* A number setting, such as driver=570. */
static inline u64 stub_number(const char *name, u64 otherwise) {
    char text[64];
    return stub_fault(name, text, sizeof text) ? strtoull(text, NULL, 10) : otherwise;
}

/* Whether a fault strikes this time: always, once, or every:N. Call it with the lock held. */
static inline int stub_strikes(const char *name) {
    char value[64], counter[NAME_LENGTH], text[32];
    if (!stub_fault(name, value, sizeof value)) return 0;
    if (!strcmp(value, "once")) stub_set_fault(name, NULL);
    if (strncmp(value, "every:", 6)) return 1;
    snprintf(counter, sizeof counter, "%s.count", name);
    u64 count = stub_number(counter, 0) + 1;
    snprintf(text, sizeof text, "%llu", count);
    stub_set_fault(counter, text);
    return count % strtoull(value + 6, NULL, 10) == 0;
}

#endif
