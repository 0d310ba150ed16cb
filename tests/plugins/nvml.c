/* A fake NVML with $FAKE_GPUS GPUs. It has the functions that sparkring calls, with the signatures of nvml.h.

   $FAKE_MIG has a digit for each GPU: the number of its MIG instances, or `-` if MIG does not divide it.
   $FAKE_STATE is a file whose lines say what happens to the GPUs. `uses GPU PID BYTES` is a process that holds memory,
   `xid GPU NUMBER` is an Xid error, `lost GPU` says that a GPU has fallen off the bus, `watts GPU WATTS` is its power,
   and `busy GPU PERCENT` is its utilization.

   With $FAKE_CUDA (such as 12020), it has the functions that say more about the driver and the GPUs, too. GPU 0 is used
   by this process, which holds 2 GiB, and by process 1. GPU 1 has memory errors and is hot, and is apart from GPU 0.
   GPU 2 has three MIG instances. All GPUs have two NVLinks, and persistence mode is off.

   The process $FAKE_PID, if there is such a variable, uses each GPU. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SUCCESS, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10, GPU_IS_LOST = 15
};
enum { WHOLE = -1, XID_EVENT = 8 };
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { int index, instance; } *Device;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; } Process;
typedef struct {
    Device device;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
} Event;
typedef struct { int index, told; } *EventSet;

static struct { int index, instance; } devices[64], instances[64][10];

static int count(void) {
    const char *text = getenv("FAKE_GPUS");
    return text ? atoi(text) : -1;
}

static int cuda(void) {
    const char *text = getenv("FAKE_CUDA");
    return text ? atoi(text) : 0;
}

static int parts(int index) {
    const char *text = getenv("FAKE_MIG");
    if (!text && cuda()) return index == 2 ? 3 : -1;
    return !text || (int)strlen(text) <= index || text[index] == '-' ? -1 : text[index] - '0';
}

/* Find the line number `skip` of the state file that begins with `word` and `index`. Store the numbers after them. */
static int state(const char *word, int index, int skip, unsigned long long *first, unsigned long long *second) {
    const char *path = getenv("FAKE_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[128], kind[16];
    int gpu, found = 0;
    while (file && !found && fgets(line, sizeof line, file)) {
        *first = *second = 0;
        if (sscanf(line, "%15s %d %llu %llu", kind, &gpu, first, second) < 2) continue;
        found = !strcmp(kind, word) && gpu == index && skip-- == 0;
    }
    if (file) fclose(file);
    return found;
}

static int is_lost(Device device) {
    unsigned long long ignored[2];
    return state("lost", device->index, 0, ignored, ignored + 1);
}

static void uuid_of(Device device, char *text) {
    int index = device->index;
    if (device->instance == WHOLE) sprintf(text, "GPU-%d%d%d%d-fake", index, index, index, index);
    else sprintf(text, "MIG-%d%d-fake", index, device->instance);
}

int nvmlInitWithFlags(unsigned int flags) { return count() < 0 ? DRIVER_NOT_LOADED : SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return "an error"; }

int nvmlDeviceGetCount_v2(unsigned int *found) {
    *found = count();
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device *device) {
    if ((int)index >= count()) return INVALID_ARGUMENT;
    devices[index].index = index;
    devices[index].instance = WHOLE;
    *device = (Device)&devices[index];
    return SUCCESS;
}

int nvmlDeviceGetMinorNumber(Device device, unsigned int *minor) {
    *minor = device->index;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(Device device, unsigned int *current, unsigned int *pending) {
    if (!getenv("FAKE_MIG") && !cuda()) return NOT_SUPPORTED;
    *current = *pending = parts(device->index) >= 0;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Device device, unsigned int *most) {
    *most = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device device, unsigned int at, Device *found) {
    if ((int)at >= parts(device->index)) return NOT_FOUND;
    instances[device->index][at].index = device->index;
    instances[device->index][at].instance = at;
    *found = (Device)&instances[device->index][at];
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(Device device, unsigned int *id) {
    if (device->instance == WHOLE) return INVALID_ARGUMENT;
    *id = device->instance + 1;
    return SUCCESS;
}

int nvmlDeviceGetName(Device device, char *name, unsigned int size) {
    snprintf(name, size, device->instance == WHOLE ? "NVIDIA Fake" : "NVIDIA Fake MIG 1g.10gb");
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device device, char *uuid, unsigned int size) {
    uuid_of(device, uuid);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Device device, Memory *memory) {
    if (is_lost(device)) return GPU_IS_LOST;
    memory->total = device->instance == WHOLE ? 80000000000ULL : 10000000000ULL;
    memory->used = 1000000000ULL * (device->index + 1);
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

/* GPU 3 and MIG instances cannot report their utilization. */
int nvmlDeviceGetUtilizationRates(Device device, Utilization *rates) {
    unsigned long long percent, ignored;
    if (is_lost(device)) return GPU_IS_LOST;
    if (device->index == 3 || device->instance != WHOLE) return NOT_SUPPORTED;
    rates->gpu = state("busy", device->index, 0, &percent, &ignored) ? percent : 10 * (device->index + 1);
    rates->memory = 0;
    return SUCCESS;
}

/* NVML reports the power in milliwatts. GPU 3 cannot report it. */
int nvmlDeviceGetPowerUsage(Device device, unsigned int *power) {
    unsigned long long watts, ignored;
    if (device->index == 3 || device->instance != WHOLE) return NOT_SUPPORTED;
    *power = 1000 * (state("watts", device->index, 0, &watts, &ignored) ? watts : 100 + device->index) + 400;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(Device device, int sensor, unsigned int *celsius) {
    if (device->instance != WHOLE) return NOT_SUPPORTED;
    *celsius = 40 + device->index;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned int *size, Process *found) {
    unsigned long long pid, used;
    unsigned int known = 0;
    if (is_lost(device)) return GPU_IS_LOST;
    if (cuda() && device->index == 0) {
        unsigned int room = *size;
        *size = 2;
        if (found == NULL || room < 2) return INSUFFICIENT_SIZE;
        found[0].pid = getpid();
        found[0].used = 2ULL << 30;
        found[1].pid = 1;
        found[1].used = 3ULL << 30;
        return SUCCESS;
    }
    if (getenv("FAKE_PID")) {
        unsigned int room = *size;
        *size = 1;
        if (room < 1) return INSUFFICIENT_SIZE;
        found[0].pid = atoi(getenv("FAKE_PID"));
        found[0].used = 1000000000ULL;
        return SUCCESS;
    }
    while (state("uses", device->index, known, &pid, &used)) {
        if (known < *size) {
            found[known].pid = pid;
            found[known].used = used;
        }
        known++;
    }
    int enough = known <= *size;
    *size = known;
    return enough ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlEventSetCreate(EventSet *set) {
    *set = calloc(1, sizeof **set);
    return SUCCESS;
}

int nvmlEventSetFree(EventSet set) {
    free(set);
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(Device device, unsigned long long types, EventSet set) {
    if (device->instance != WHOLE || types != XID_EVENT) return NOT_SUPPORTED;
    set->index = device->index;
    return SUCCESS;
}

int nvmlEventSetWait_v2(EventSet set, Event *event, unsigned int timeout_ms) {
    unsigned long long number, ignored;
    if (!state("xid", set->index, set->told, &number, &ignored)) return TIMEOUT;
    set->told++;
    event->device = (Device)&devices[set->index];
    event->type = XID_EVENT;
    event->data = number;
    event->gpu_instance = event->compute_instance = 0xFFFFFFFF;
    return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *version, unsigned int size) {
    snprintf(version, size, "535.104.05");
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = cuda();
    return cuda() ? SUCCESS : NOT_SUPPORTED;
}

int nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int size) {
    snprintf(name, size, "/usr/bin/program-%u", pid);
    return SUCCESS;
}

int nvmlDeviceGetPersistenceMode(Device device, int *mode) {
    *mode = 0;
    return cuda() ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetTotalEccErrors(Device device, int type, int counter, unsigned long long *errors) {
    *errors = device->index == 1 && type == 1 && counter == 0 ? 5 : 0;
    return cuda() ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long *reasons) {
    *reasons = device->index == 1 ? 0x40 | 0x4 | 0x1 : 0x1; /* heat, the power limit, idle */
    return cuda() ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkState(Device device, unsigned int link, unsigned int *active) {
    *active = link < 2;
    return cuda() && link < 4 ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetP2PStatus(Device one, Device other, int capability, int *status) {
    *status = one->index == 0 && other->index == 1 ? 1 : 0;
    return cuda() ? SUCCESS : NOT_SUPPORTED;
}
