/* SPDX-License-Identifier: Apache-2.0
 *
 * NVML of a machine with two GPUs: 18 links each to a switch that nobody sees, and 2 from one to the other. The bus ids
 * are such that no real /sys has them. */
#include <stdio.h>
#include <string.h>

struct pci_info {
    char legacy[16];
    unsigned domain, bus, device, ids, subsystem_ids;
    char busid[32];
};

struct field_value {
    unsigned field, scope;
    long long when, latency;
    int type, result;
    union {
        double d;
        unsigned ui;
    } value;
};

static char gpus[2];

#define EXPORT __attribute__((visibility("default")))

EXPORT int nvmlInit_v2(void);
EXPORT int nvmlShutdown(void);
EXPORT int nvmlDeviceGetCount_v2(unsigned *count);
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device);
EXPORT int nvmlDeviceGetPciInfo_v3(void *device, struct pci_info *info);
EXPORT int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor);
EXPORT int nvmlDeviceGetNvLinkCapability(void *device, unsigned link, int cap, unsigned *value);
EXPORT int nvmlDeviceGetNvLinkState(void *device, unsigned link, int *state);
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, struct pci_info *info);
EXPORT int nvmlDeviceGetFieldValues(void *device, int count, struct field_value *values);

int nvmlInit_v2(void)
{
    return 0;
}

int nvmlShutdown(void)
{
    return 0;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = 2;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    *device = &gpus[index];
    return 0;
}

int nvmlDeviceGetPciInfo_v3(void *device, struct pci_info *info)
{
    memset(info, 0, sizeof(*info));
    (void)snprintf(info->busid, sizeof(info->busid), "0000FEDC:%02X:00.0",
                   device == &gpus[0] ? 0x1b : 0x2b);
    info->ids = 0x233510deU;
    return 0;
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor)
{
    *major = 9;
    *minor = 0;
    return 0;
}

int nvmlDeviceGetNvLinkCapability(void *device, unsigned link, int cap, unsigned *value)
{
    *value = link < 20;
    return link < 20 ? 0 : 2;
}

int nvmlDeviceGetNvLinkState(void *device, unsigned link, int *state)
{
    *state = 0; /* not asked of newer GPUs */
    return 0;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, struct pci_info *info)
{
    memset(info, 0, sizeof(*info));
    if (link >= 18)
        (void)nvmlDeviceGetPciInfo_v3(device == &gpus[0] ? &gpus[1] : &gpus[0], info);
    return 0;
}

int nvmlDeviceGetFieldValues(void *device, int count, struct field_value *values)
{
    for (int i = 0; i < count; i++) {
        values[i].result = values[i].field == 165 ? 0 : 3;
        values[i].value.ui = 1;
    }
    return 0;
}
