/* A fake NVML with $FAKE_GPUS GPUs. It has the functions that sparkring calls, with the signatures of nvml.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9 };
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { int index; } *Device;

static struct { int index; } devices[64];

static int count(void) {
    const char *text = getenv("FAKE_GPUS");
    return text ? atoi(text) : -1;
}

static void uuid_of(int index, char *text) { sprintf(text, "GPU-%d%d%d%d-fake", index, index, index, index); }

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
    *device = (Device)&devices[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) {
    char known[32];
    for (int index = 0; index < count(); index++) {
        uuid_of(index, known);
        if (!strcmp(uuid, known)) return nvmlDeviceGetHandleByIndex_v2(index, device);
    }
    return NOT_FOUND;
}

int nvmlDeviceGetName(Device device, char *name, unsigned int size) {
    snprintf(name, size, "NVIDIA Fake");
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device device, char *uuid, unsigned int size) {
    uuid_of(device->index, uuid);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Device device, Memory *memory) {
    memory->total = 80000000000ULL;
    memory->used = 1000000000ULL * (device->index + 1);
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

/* GPU 3 cannot report its utilization, like a MIG GPU. */
int nvmlDeviceGetUtilizationRates(Device device, Utilization *rates) {
    if (device->index == 3) return NOT_SUPPORTED;
    rates->gpu = 10 * (device->index + 1);
    rates->memory = 0;
    return SUCCESS;
}

typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; } Process;

/* The process $FAKE_PID, if there is such a variable, uses each GPU. */
int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned int *count, Process *processes) {
    const char *pid = getenv("FAKE_PID");
    unsigned int room = *count;
    *count = pid ? 1 : 0;
    if (*count > room) return 7; /* NVML_ERROR_INSUFFICIENT_SIZE */
    if (pid) processes[0] = (Process){(unsigned int)atoi(pid), 1000000000ULL, -1, -1};
    return SUCCESS;
}
