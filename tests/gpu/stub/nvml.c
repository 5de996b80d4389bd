/* A stand-in for libnvidia-ml.so.1: what state.h knows of devices and processes, by the functions that pynvml calls.
 *
 * Signatures, structures and codes as in nvml.h of NVML 13, where nvidia-ml-py 13.615.71 declares them; all of them
 * are there since driver r510. Processes that are checkpointed are not listed, as is reported of the driver.
 * Settings in the file "faults":
 *
 *   nvml=not_loaded|no_permission|lost   the driver is not there; it refuses; every GPU has fallen off the bus
 *   nvml_lost=UUID                       that one has
 *   nvml_hangs=1                         no question about a device is answered while this stands
 *   nvml_fails=always|once|every:N       measuring memory fails with an unknown error
 *   novalue=1                            bytes of processes are not told
 *   reserved=BYTES                       what the driver keeps for itself on each device
 *   persistence=0                        persistence mode is off
 *   driver=NUMBER                        release of the driver
 */
#include "state.h"

enum {
    OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, UNKNOWN = 999
};
#define NO_VALUE (~0ULL)

typedef Device *Handle; /* a place in `known`, good as long as the library is loaded */
typedef struct { unsigned pid; u64 bytes; unsigned gpu_instance, compute_instance; } ProcessInfo; /* _v2_t = _v3 */
typedef struct { unsigned version; u64 total, reserved, free, used; } Memory;                     /* _v2_t */
typedef struct { unsigned gpu, memory; } Utilization;

static Device known[MOST];

static int trouble(Handle device) {
    char value[NAME_LENGTH];
    while (stub_fault("nvml_hangs", value, sizeof value)) usleep(20000);
    if (stub_fault("nvml", value, sizeof value)) {
        if (!strcmp(value, "not_loaded")) return DRIVER_NOT_LOADED;
        if (!strcmp(value, "no_permission")) return NO_PERMISSION;
        if (!strcmp(value, "lost") && device) return GPU_IS_LOST;
    }
    if (device && stub_fault("nvml_lost", value, sizeof value) && !strcmp(value, device->uuid)) return GPU_IS_LOST;
    return OK;
}

static Handle find(const char *uuid) {
    Device found[MOST];
    for (int i = 0, count = stub_devices(found); i < count; i++) {
        if (strcmp(found[i].uuid, uuid)) continue;
        known[i] = found[i]; /* devices are only ever added at the end */
        return &known[i];
    }
    return NULL;
}

/* The number-th device with this parent ("" for GPUs), or how many there are. */
static Handle part(const char *parent, int number, int *count) {
    Device found[MOST];
    Handle wanted = NULL;
    int seen = 0;
    for (int i = 0, all = stub_devices(found); i < all; i++)
        if (!strcmp(found[i].parent, parent) && seen++ == number) wanted = find(found[i].uuid);
    if (count) *count = seen;
    return wanted;
}

static int parts_of(Handle device) {
    int count;
    part(device->uuid, -1, &count);
    return device->parent[0] ? 0 : count;
}

static int copied(const char *from, char *to, unsigned length) {
    if (strlen(from) >= length) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return OK;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return getenv("STUB_GPU_DIR") ? trouble(NULL) : DRIVER_NOT_LOADED;
}

int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int code) {
    (void)code;
    return "stub error";
}

int nvmlSystemGetDriverVersion(char *out, unsigned length) {
    char value[NAME_LENGTH];
    snprintf(value, sizeof value, "%llu.86.10", stub_number("driver", 570));
    return copied(value, out, length);
}

int nvmlDeviceGetCount_v2(unsigned *out) {
    int code = trouble(NULL), count;
    part("", -1, &count);
    *out = count;
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *out) {
    *out = part("", index, NULL);
    return *out ? trouble(*out) : INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Handle *out) {
    *out = find(uuid);
    return *out ? trouble(*out) : NOT_FOUND;
}

int nvmlDeviceGetUUID(Handle device, char *out, unsigned length) { return copied(device->uuid, out, length); }

int nvmlDeviceGetName(Handle device, char *out, unsigned length) { return copied(device->name, out, length); }

int nvmlDeviceGetMigMode(Handle device, unsigned *current, unsigned *pending) {
    *current = *pending = parts_of(device) > 0;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(Handle device, unsigned *out) {
    (void)device;
    *out = 7;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Handle device, unsigned index, Handle *out) {
    *out = part(device->uuid, index, NULL);
    return *out ? OK : NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Handle device, Handle *out) {
    *out = device->parent[0] ? find(device->parent) : NULL;
    return *out ? OK : INVALID_ARGUMENT;
}

int nvmlDeviceGetMemoryInfo_v2(Handle device, Memory *out) {
    int code = trouble(device), lock = stub_lock();
    if (!code && stub_strikes("nvml_fails")) code = UNKNOWN;
    stub_unlock(lock);
    if (code) return code;
    out->total = device->total;
    out->reserved = stub_number("reserved", 0);
    out->used = stub_used(device->uuid);
    out->free = out->total > out->reserved + out->used ? out->total - out->reserved - out->used : 0;
    return OK;
}

int nvmlDeviceGetPersistenceMode(Handle device, unsigned *out) {
    if (device->parent[0]) return INVALID_ARGUMENT;
    *out = (unsigned)stub_number("persistence", 1);
    return trouble(device);
}

int nvmlDeviceGetUtilizationRates(Handle device, Utilization *out) {
    static __thread Proc procs[MOST];
    if (device->parent[0] || parts_of(device)) return NOT_SUPPORTED; /* MIG */
    out->gpu = out->memory = 0;
    for (int i = 0, count = stub_procs(procs); i < count; i++)
        if (stub_is_on(&procs[i], device->uuid)) out->gpu += procs[i].util;
    if (out->gpu > 100) out->gpu = 100;
    return trouble(device);
}

int nvmlDeviceGetComputeRunningProcesses_v3(Handle device, unsigned *count, ProcessInfo *out) {
    static __thread Proc procs[MOST];
    unsigned room = *count, found = 0;
    int code = trouble(device);
    if (code) return code;
    for (int i = 0, all = stub_procs(procs); i < all; i++) {
        if (!stub_is_on(&procs[i], device->uuid)) continue;
        if (out && found < room) {
            u64 bytes = stub_number("novalue", 0) ? NO_VALUE : stub_bytes_on(&procs[i], device->uuid);
            out[found] = (ProcessInfo){procs[i].pid, bytes, ~0u, ~0u};
        }
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Handle device, unsigned *count, ProcessInfo *out) {
    (void)out;
    *count = 0;
    return device->parent[0] ? NOT_SUPPORTED : trouble(device);
}
