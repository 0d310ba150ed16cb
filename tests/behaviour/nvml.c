/* A fake NVML with $FAKE_GPUS GPUs. It has the functions that sparkring calls, with the signatures of nvml.h.

   With $FAKE_CUDA (such as 12020), it has the functions that say more about the driver and the GPUs, too. GPU 0 is used
   by this process, which holds 2 GiB, and by process 1. GPU 1 has memory errors and is hot, and is apart from GPU 0.
   GPU 2 has MIG instances. All GPUs have two NVLinks, and persistence mode is off. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { int index; } *Device;
typedef struct { unsigned int pid; unsigned long long used; unsigned int instance, compute; } Process;

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

static int cuda(void) {
    const char *text = getenv("FAKE_CUDA");
    return text ? atoi(text) : 0;
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

int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned int *found, Process *processes) {
    if (!cuda()) return NOT_SUPPORTED;
    unsigned int room = *found;
    *found = device->index == 0 ? 2 : 0;
    if (*found == 0) return SUCCESS;
    if (processes == NULL || room < *found) return INSUFFICIENT_SIZE;
    processes[0].pid = getpid();
    processes[0].used = 2ULL << 30;
    processes[1].pid = 1;
    processes[1].used = 3ULL << 30;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(Device device, unsigned int *current, unsigned int *pending) {
    *current = *pending = device->index == 2;
    return cuda() ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetMaxMigDeviceCount(Device device, unsigned int *most) {
    *most = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device device, unsigned int index, Device *instance) {
    *instance = device;
    return index < 3 ? SUCCESS : NOT_FOUND;
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
