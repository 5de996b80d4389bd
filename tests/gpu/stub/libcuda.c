/* Stand-in for libcuda.so.1: enough of the driver API for cuda-bindings to checkpoint, and for a worker to allocate.
 *
 * Mirrors NVIDIA's cuda.h of 12.8, with the device maps of 13.0 (CUcheckpointRestoreArgs.gpuPairs); cuda-bindings finds
 * all by cuGetProcAddress_v2. Device memory is a file in the node's folder, which cuMemcpy reads and writes; a call on
 * memory waits while the process is locked or checkpointed, as it does on a GPU. Only what is listed at the end exists.
 * No accelerator is involved.
 */
#include "operations.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct {
    unsigned char bytes[16];
} Uuid;
typedef struct {
    Uuid old, new;
} Pair;
typedef struct {
    unsigned int timeout_ms, reserved0;
    u64 reserved[7];
} LockArgs;
typedef struct {
    Pair *pairs;
    unsigned int count, padding;
    char reserved[48];
} RestoreArgs;

EXPORT int cuInit(unsigned int flags) {
    char path[512];
    stub_path(path, sizeof path, "devices");
    return access(path, R_OK) ? 100 : OK; /* no device */
}

EXPORT int cuDriverGetVersion(int *out) {
    u64 driver = stub_driver();
    *out = driver >= 580 ? 13000 : driver >= 570 ? 12080 : 12040;
    return OK;
}

EXPORT int cuGetErrorString(int code, const char **out) {
    *out = stub_text(code);
    return OK;
}

EXPORT int cuGetErrorName(int code, const char **out) { return cuGetErrorString(code, out); }

EXPORT int cuDeviceGetCount(int *out) {
    Device devices[MOST];
    *out = stub_devices(devices);
    return OK;
}

EXPORT int cuDeviceGet(int *out, int ordinal) {
    *out = ordinal;
    return OK;
}

static int find(int device, Device *out) {
    Device devices[MOST];
    if (device < 0 || device >= stub_devices(devices)) return 101; /* invalid device */
    *out = devices[device];
    return OK;
}

EXPORT int cuDeviceGetUuid_v2(Uuid *out, int device) {
    Device found;
    int code = find(device, &found), at = 0;
    for (const char *text = found.uuid + 4; !code && *text && at < 16;) { /* behind GPU- or MIG- */
        unsigned int byte;
        if (*text == '-') text++;
        sscanf(text, "%2x", &byte);
        out->bytes[at++] = byte;
        text += 2;
    }
    return code;
}

EXPORT int cuDeviceTotalMem_v2(size_t *out, int device) {
    Device found;
    int code = find(device, &found);
    if (!code) *out = found.total;
    return code;
}

static __thread int current = -1; /* device of this thread's context, which is also its handle less one */

EXPORT int cuCtxCreate_v2(void **out, unsigned int flags, int device) {
    Device found;
    Proc proc;
    int lock, code = find(device, &found);
    if (code) return code;
    if (stub_open(getpid(), &lock, &proc)) snprintf(proc.state, sizeof proc.state, "running");
    snprintf(proc.context[proc.contexts].uuid, NAME_LENGTH, "%s", found.uuid);
    proc.context[proc.contexts++].bytes = stub_number("context-bytes", 0);
    stub_save(&proc);
    current = device;
    *out = (void *)(size_t)(device + 1);
    return stub_close(lock, OK);
}

EXPORT int cuCtxSetCurrent(void *context) {
    current = (int)(size_t)context - 1;
    return OK;
}

EXPORT int cuCtxSynchronize(void) { return OK; }

/* Read this process once it may work. Who waits holds no lock: it may be stopped meanwhile. */
static int enter(int *lock, Proc *proc) {
    for (;; stub_pause()) {
        if (stub_proc(getpid(), proc) && !stub_is_running(proc)) continue;
        int code = stub_open(getpid(), lock, proc);
        if (code || stub_is_running(proc)) return code;
        stub_unlock(*lock);
    }
}

static int content(const Proc *proc, u64 address, int flags) {
    char path[512];
    stub_path(path, sizeof path, "memory/%d-%llu-%llu", proc->pid, proc->start, address);
    return open(path, flags | O_CLOEXEC, 0600);
}

EXPORT int cuMemAlloc_v2(u64 *out, size_t bytes) {
    Device found;
    Proc proc;
    int lock, code = enter(&lock, &proc);
    if (!code) code = find(current, &found);
    if (!code && (proc.allocs == MOST || stub_used(found.uuid) + bytes > found.total)) code = OUT_OF_MEMORY;
    if (code) return stub_close(lock, code);
    u64 address = 1ULL << 40;
    for (int i = 0; i < proc.allocs; i++)
        if (proc.alloc[i].address >= address) address = proc.alloc[i].address + (1ULL << 40);
    int file = content(&proc, address, O_RDWR | O_CREAT | O_TRUNC);
    if (file < 0 || ftruncate(file, bytes)) code = UNKNOWN;
    if (file >= 0) close(file);
    Block *block = &proc.alloc[proc.allocs++];
    snprintf(block->uuid, NAME_LENGTH, "%s", found.uuid);
    block->bytes = bytes;
    block->address = *out = address;
    stub_save(&proc);
    return stub_close(lock, code);
}

EXPORT int cuMemFree_v2(u64 address) {
    Proc proc;
    char path[512];
    int lock, code = enter(&lock, &proc), found = 0;
    for (int i = 0; !code && i < proc.allocs; i++) {
        if (found) proc.alloc[i - 1] = proc.alloc[i];
        found |= proc.alloc[i].address == address;
    }
    if (!found) return stub_close(lock, code ? code : INVALID_VALUE);
    proc.allocs--;
    stub_path(path, sizeof path, "memory/%d-%llu-%llu", proc.pid, proc.start, address);
    unlink(path);
    stub_save(&proc);
    return stub_close(lock, OK);
}

static int copy(u64 address, void *into, const void *from, size_t bytes) {
    Proc proc;
    int lock, code = enter(&lock, &proc);
    u64 block = address & ~((1ULL << 40) - 1);
    int file = code ? -1 : content(&proc, block, from ? O_WRONLY : O_RDONLY);
    ssize_t done = file < 0 ? -1
                   : from   ? pwrite(file, from, bytes, address - block)
                            : pread(file, into, bytes, address - block);
    if (file >= 0) close(file);
    return stub_close(lock, code ? code : done == (ssize_t)bytes ? OK : INVALID_VALUE);
}

EXPORT int cuMemcpyHtoD_v2(u64 to, const void *from, size_t bytes) { return copy(to, NULL, from, bytes); }
EXPORT int cuMemcpyDtoH_v2(void *to, u64 from, size_t bytes) { return copy(from, to, NULL, bytes); }

EXPORT int cuCheckpointProcessGetState(int pid, int *out) {
    const char *names[] = {"running", "locked", "checkpointed", "failed"};
    char state[16] = "";
    int code = stub_get_state(pid, state, sizeof state);
    for (int i = 0; !code && i < 4; i++)
        if (!strcmp(state, names[i])) *out = i;
    return code;
}

EXPORT int cuCheckpointProcessGetRestoreThreadId(int pid, int *out) { return stub_restore_thread(pid, out); }

EXPORT int cuCheckpointProcessLock(int pid, LockArgs *args) {
    return stub_lock_process(pid, args ? args->timeout_ms : 0);
}

EXPORT int cuCheckpointProcessCheckpoint(int pid, void *args) { return stub_checkpoint(pid); }

static int write_uuid(char *out, const Uuid *uuid) {
    int at = sprintf(out, "GPU-");
    for (int i = 0; i < 16; i++)
        at += sprintf(out + at, "%02x%s", uuid->bytes[i], i == 3 || i == 5 || i == 7 || i == 9 ? "-" : "");
    return at;
}

EXPORT int cuCheckpointProcessRestore(int pid, RestoreArgs *args) {
    char map[MOST * 2 * NAME_LENGTH] = "";
    for (unsigned int i = 0, at = 0; args && i < args->count && i < MOST; i++) {
        at += sprintf(map + at, "%s", i ? "," : "");
        at += write_uuid(map + at, &args->pairs[i].old);
        at += sprintf(map + at, "=");
        at += write_uuid(map + at, &args->pairs[i].new);
    }
    return stub_restore(pid, map);
}

EXPORT int cuCheckpointProcessUnlock(int pid, void *args) { return stub_unlock_process(pid); }

EXPORT int cuGetProcAddress_v2(const char *name, void **out, int version, u64 flags, int *found);

static const struct {
    const char *name;
    void *function;
    u64 since; /* driver */
} functions[] = {
    {"cuInit", cuInit, 0},
    {"cuDriverGetVersion", cuDriverGetVersion, 0},
    {"cuGetErrorString", cuGetErrorString, 0},
    {"cuGetErrorName", cuGetErrorName, 0},
    {"cuDeviceGetCount", cuDeviceGetCount, 0},
    {"cuDeviceGet", cuDeviceGet, 0},
    {"cuDeviceGetUuid", cuDeviceGetUuid_v2, 0},
    {"cuCheckpointProcessGetState", cuCheckpointProcessGetState, 570},
    {"cuCheckpointProcessGetRestoreThreadId", cuCheckpointProcessGetRestoreThreadId, 570},
    {"cuCheckpointProcessLock", cuCheckpointProcessLock, 570},
    {"cuCheckpointProcessCheckpoint", cuCheckpointProcessCheckpoint, 570},
    {"cuCheckpointProcessRestore", cuCheckpointProcessRestore, 570},
    {"cuCheckpointProcessUnlock", cuCheckpointProcessUnlock, 570},
    {"cuGetProcAddress", cuGetProcAddress_v2, 0},
};

EXPORT int cuGetProcAddress_v2(const char *name, void **out, int version, u64 flags, int *found) {
    *out = NULL;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (!strcmp(name, functions[i].name) && stub_driver() >= functions[i].since) *out = functions[i].function;
    if (found) *found = *out ? 0 : 1;
    return *out ? OK : 500; /* not found */
}
