/* A libnvidia-ml.so.1 that makes up its GPUs, so that tests of real programs need none.
 *
 *     gcc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 fake_nvml.c
 *     LD_LIBRARY_PATH=. FAKE_NVML_GPUS="NVIDIA H100 80GB HBM3;NVIDIA H100 80GB HBM3" python ...
 *
 * Every variable is read at every call:
 *
 *     FAKE_NVML_GPUS        the names of the GPUs, with ';' between; none where empty or unset
 *     FAKE_NVML_MEMORY_MB   memory of each GPU (81559)
 *     FAKE_NVML_CPUS        the CPUs of each NUMA node, with ';' between ("0-7;8-15"); the GPUs are dealt to the nodes
 *     FAKE_NVML_DRIVER      the driver's version ("570.86.15")
 *     FAKE_NVML_INIT_ERROR  what nvmlInit returns: 9 driver not loaded, 18 library and driver differ, 4 no permission
 *     FAKE_NVML_LOST        "1": GPU 1 has fallen off the bus, no handle can be had
 *     FAKE_NVML_LOST_LATER  "1": GPU 1 falls off the bus once its name has been asked
 *     FAKE_NVML_UNSUPPORTED "1": GPU 1 answers "not supported" wherever NVML's reference allows that
 *     FAKE_NVML_BUSY        "0:4242:1024,1:77:512": processes as GPU:PID:MiB
 *     FAKE_NVML_MIG         "1:2,3:0": GPU 1 is in MIG mode with two GPU instances, GPU 3 with none
 *     FAKE_NVML_MIG_SPLIT   compute instances in each GPU instance (1)
 *     FAKE_NVML_RATES       "87;12": percent of the time in which each GPU was busy (0)
 *     FAKE_NVML_AILING      "1:85:64:3:1": GPU 1 has 85 degrees, reasons for a low clock (64), 3 memory errors that ECC could
 *                           not correct, and rows of memory that wait for a reset (1)
 *     FAKE_NVML_LINKS       "0-3,1-2": the pairs of GPUs with NVLink between them; the others are as near as their nodes
 *     FAKE_NVML_FABRICS     "c0…c0:7:3;00…00:0:3": for each GPU the UUID of its NVLink cluster in 32 hex digits, its clique,
 *                           and the state of its registration (3: completed); not supported where there is none
 *     FAKE_NVML_BUSY_WHILE  a file; FAKE_NVML_BUSY holds only while it is there
 *     FAKE_NVML_WEDGED      a file; while it is there, whoever asks how busy or hot a GPU is gets no answer
 *
 * Only what nvidia-ml-py calls for ddplaunch, and torch for counting devices, is here. Layouts and return codes are
 * those of NVIDIA's nvml.h; the UUIDs are "GPU-fa4e0000-0000-0000-0000-" and the index, and GPUs sit on PCI buses 0x10,
 * 0x18, 0x20 and so on.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int nvmlReturn_t;

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
};

#define MOST_GPUS 16
#define MOST_MIG 8 /* places for MIG devices on a GPU; nvmlDeviceGetMaxMigDeviceCount says 7 for real ones */
#define NO_INSTANCE 0xFFFFFFFFu

/* A handle: a GPU, or the MIG device at place mig of it. */
typedef struct device {
    int gpu;
    int mig; /* -1: the whole GPU */
} *nvmlDevice_t;

typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned int gpu, memory;
} nvmlUtilization_t;

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

typedef struct {
    unsigned int version;
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    unsigned int cliqueId;
    unsigned char state;
    unsigned int healthMask;
} nvmlGpuFabricInfo_v2_t;

static struct device whole[MOST_GPUS];
static struct device parts[MOST_GPUS][MOST_MIG];
static int started;

/* What the variables say. */

static const char *text(const char *variable, const char *otherwise)
{
    const char *value = getenv(variable);
    return value && *value ? value : otherwise;
}

static int number(const char *variable, int otherwise)
{
    const char *value = text(variable, NULL);
    return value ? atoi(value) : otherwise;
}

static int count_parts(const char *list, char separator)
{
    int parts = *list != '\0';
    for (; *list; list++)
        parts += *list == separator;
    return parts;
}

/* Copy part number place of the list to out; leave out empty where there is none. */
static void get_part(const char *list, char separator, int place, char *out, size_t size)
{
    while (place-- > 0 && list) {
        list = strchr(list, separator);
        list = list ? list + 1 : NULL;
    }
    snprintf(out, size, "%s", list ? list : "");
    out[strcspn(out, (char[]){separator, '\0'})] = '\0';
}

static int count_gpus(void)
{
    int gpus = count_parts(text("FAKE_NVML_GPUS", ""), ';');
    return gpus < MOST_GPUS ? gpus : MOST_GPUS;
}

/* The number of GPU instances of a GPU, -1 where it is not in MIG mode. */
static int count_gpu_instances(int gpu)
{
    const char *list = text("FAKE_NVML_MIG", "");
    for (int place = 0; place < count_parts(list, ','); place++) {
        char entry[32];
        int which, instances;
        get_part(list, ',', place, entry, sizeof entry);
        if (sscanf(entry, "%d:%d", &which, &instances) == 2 && which == gpu)
            return instances;
    }
    return -1;
}

static unsigned long long memory_of(nvmlDevice_t device)
{
    unsigned long long total = (unsigned long long)number("FAKE_NVML_MEMORY_MB", 81559) << 20;
    return device->mig < 0 ? total : total / 8;
}

/* The process at place of FAKE_NVML_BUSY, where it is on this GPU. */
static int process_at(int place, int gpu, unsigned int *pid, unsigned long long *memory)
{
    char entry[64];
    int which, mib;
    if (access(text("FAKE_NVML_BUSY_WHILE", "/"), F_OK) != 0)
        return 0;
    get_part(text("FAKE_NVML_BUSY", ""), ',', place, entry, sizeof entry);
    if (sscanf(entry, "%d:%u:%d", &which, pid, &mib) != 3 || which != gpu)
        return 0;
    *memory = (unsigned long long)mib << 20;
    return 1;
}

static int node_of(int gpu)
{
    return gpu * count_parts(text("FAKE_NVML_CPUS", "0-7;8-15"), ';') / count_gpus();
}

static nvmlReturn_t give(const char *value, char *out, unsigned int size)
{
    if (strlen(value) + 1 > size)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(out, value);
    return NVML_SUCCESS;
}

/* What every question about a device must pass; which questions a lost or poor GPU fails. */

static nvmlReturn_t check(nvmlDevice_t device)
{
    if (!started)
        return NVML_ERROR_UNINITIALIZED;
    if (!device || device->gpu >= count_gpus())
        return NVML_ERROR_INVALID_ARGUMENT;
    return NVML_SUCCESS;
}

static nvmlReturn_t check_further(nvmlDevice_t device)
{
    nvmlReturn_t result = check(device);
    if (result == NVML_SUCCESS && number("FAKE_NVML_LOST_LATER", -1) == device->gpu)
        return NVML_ERROR_GPU_IS_LOST;
    return result;
}

static nvmlReturn_t check_optional(nvmlDevice_t device)
{
    nvmlReturn_t result = check_further(device);
    if (result == NVML_SUCCESS && number("FAKE_NVML_UNSUPPORTED", -1) == device->gpu)
        return NVML_ERROR_NOT_SUPPORTED;
    return result;
}

#define REQUIRE(checked)                  \
    do {                                  \
        nvmlReturn_t result = (checked);  \
        if (result != NVML_SUCCESS)       \
            return result;                \
    } while (0)

/* The library. */

nvmlReturn_t nvmlInit_v2(void)
{
    nvmlReturn_t error = number("FAKE_NVML_INIT_ERROR", NVML_SUCCESS);
    if (error != NVML_SUCCESS)
        return error;
    for (int gpu = 0; gpu < MOST_GPUS; gpu++) {
        whole[gpu] = (struct device){gpu, -1};
        for (int place = 0; place < MOST_MIG; place++)
            parts[gpu][place] = (struct device){gpu, place};
    }
    started++;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit(void)
{
    return nvmlInit_v2();
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    return nvmlInit_v2();
}

nvmlReturn_t nvmlShutdown(void)
{
    if (!started)
        return NVML_ERROR_UNINITIALIZED;
    started--;
    return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t error)
{
    switch (error) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    }
    return "Unknown Error";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int size)
{
    return started ? give(text("FAKE_NVML_DRIVER", "570.86.15"), version, size) : NVML_ERROR_UNINITIALIZED;
}

/* GPUs. */

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    if (!started)
        return NVML_ERROR_UNINITIALIZED;
    *count = (unsigned int)count_gpus();
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    if (!started)
        return NVML_ERROR_UNINITIALIZED;
    if (index >= (unsigned int)count_gpus())
        return NVML_ERROR_INVALID_ARGUMENT;
    if (number("FAKE_NVML_LOST", -1) == (int)index)
        return NVML_ERROR_GPU_IS_LOST;
    *device = &whole[index];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int size)
{
    char of_gpu[64], of_part[96];
    REQUIRE(check(device));
    get_part(text("FAKE_NVML_GPUS", ""), ';', device->gpu, of_gpu, sizeof of_gpu);
    if (device->mig < 0)
        return give(of_gpu, name, size);
    int split = number("FAKE_NVML_MIG_SPLIT", 1);
    snprintf(of_part, sizeof of_part, split > 1 ? "%s MIG 1c.2g.10gb" : "%s MIG 1g.10gb", of_gpu);
    return give(of_part, name, size);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int size)
{
    char value[64];
    REQUIRE(check_further(device));
    if (device->mig < 0)
        snprintf(value, sizeof value, "GPU-fa4e0000-0000-0000-0000-%012x", device->gpu);
    else
        snprintf(value, sizeof value, "MIG-%02x%02x0000-0000-0000-0000-000000000000", device->gpu, device->mig);
    return give(value, uuid, size);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info)
{
    REQUIRE(check_further(device));
    memset(info, 0, sizeof *info);
    info->bus = 0x10 + 8 * (unsigned int)device->gpu;
    info->pciDeviceId = 0x233010de;
    snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "0000:%02X:00.0", info->bus);
    snprintf(info->busId, sizeof info->busId, "00000000:%02X:00.0", info->bus);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    REQUIRE(check_optional(device));
    memory->total = memory_of(device);
    memory->used = 1ull << 20;
    for (int place = 0; place < count_parts(text("FAKE_NVML_BUSY", ""), ','); place++) {
        unsigned int pid;
        unsigned long long used;
        if (process_at(place, device->gpu, &pid, &used))
            memory->used += used;
    }
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates)
{
    char percent[16];
    REQUIRE(check_optional(device));
    while (access(text("FAKE_NVML_WEDGED", ""), F_OK) == 0)
        pause();
    get_part(text("FAKE_NVML_RATES", ""), ';', device->gpu, percent, sizeof percent);
    rates->gpu = (unsigned int)atoi(percent);
    rates->memory = 0;
    return NVML_SUCCESS;
}

/* One of the numbers behind the GPU's own in FAKE_NVML_AILING; 0 for a GPU that is well. */
static unsigned int ailment(nvmlDevice_t device, int place)
{
    char part[16];
    get_part(text("FAKE_NVML_AILING", ""), ':', 0, part, sizeof part);
    if (!*part || atoi(part) != device->gpu)
        return 0;
    get_part(text("FAKE_NVML_AILING", ""), ':', place, part, sizeof part);
    return (unsigned int)atoi(part);
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned int *degrees)
{
    (void)sensor;
    REQUIRE(check_optional(device));
    while (access(text("FAKE_NVML_WEDGED", ""), F_OK) == 0)
        pause();
    *degrees = ailment(device, 1);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts)
{
    char watts[16];
    REQUIRE(check_optional(device));
    get_part(text("FAKE_NVML_POWER", ""), ';', device->gpu, watts, sizeof watts);
    *milliwatts = 1000 * (unsigned int)atoi(watts);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    REQUIRE(check_optional(device));
    *reasons = ailment(device, 2);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int kind, int counter, unsigned long long *errors)
{
    (void)kind, (void)counter;
    REQUIRE(check_optional(device));
    *errors = ailment(device, 3);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                                       unsigned int *pending, unsigned int *failed)
{
    REQUIRE(check_optional(device));
    *corrected = *uncorrected = *failed = 0;
    *pending = ailment(device, 4);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int words, unsigned long *mask)
{
    char list[256];
    REQUIRE(check_optional(device));
    memset(mask, 0, words * sizeof *mask);
    get_part(text("FAKE_NVML_CPUS", "0-7;8-15"), ';', node_of(device->gpu), list, sizeof list);
    for (char *at = list; *at;) {
        unsigned long first = strtoul(at, &at, 10), last = *at == '-' ? strtoul(at + 1, &at, 10) : first;
        for (; first <= last && first / 64 < words; first++)
            mask[first / 64] |= 1ul << first % 64;
        at += *at == ',';
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int words, unsigned long *mask, int scope)
{
    (void)scope;
    REQUIRE(check_optional(device));
    memset(mask, 0, words * sizeof *mask);
    mask[0] = 1ul << node_of(device->gpu);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *out)
{
    unsigned int room = *count;
    REQUIRE(check_optional(device));
    *count = 0;
    for (int place = 0; place < count_parts(text("FAKE_NVML_BUSY", ""), ','); place++) {
        nvmlProcessInfo_t process = {0, 0, NO_INSTANCE, NO_INSTANCE};
        if (!process_at(place, device->gpu, &process.pid, &process.usedGpuMemory))
            continue;
        if (*count < room)
            out[*count] = process;
        ++*count;
    }
    return *count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* How near two GPUs are to each other. */

nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t one, nvmlDevice_t other, int capability, int *status)
{
    REQUIRE(check_optional(one));
    REQUIRE(check_optional(other));
    *status = 1; /* no such link */
    for (int place = 0; capability == 2 && place < count_parts(text("FAKE_NVML_LINKS", ""), ','); place++) {
        char entry[16];
        int first, last;
        get_part(text("FAKE_NVML_LINKS", ""), ',', place, entry, sizeof entry);
        if (sscanf(entry, "%d-%d", &first, &last) == 2 && (first == one->gpu || first == other->gpu) &&
            (last == one->gpu || last == other->gpu) && first != last)
            *status = 0;
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other, int *level)
{
    REQUIRE(check_optional(one));
    REQUIRE(check_optional(other));
    *level = node_of(one->gpu) == node_of(other->gpu) ? 40 : 50;
    return NVML_SUCCESS;
}

/* The NVLink fabric that reaches other machines. */

nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_v2_t *info)
{
    char entry[64], digits[33];
    unsigned int clique, state;
    REQUIRE(check_optional(device));
    if (info->version != (sizeof *info | 2 << 24))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    get_part(text("FAKE_NVML_FABRICS", ""), ';', device->gpu, entry, sizeof entry);
    if (sscanf(entry, "%32[0-9a-f]:%u:%u", digits, &clique, &state) != 3)
        return NVML_ERROR_NOT_SUPPORTED;
    for (int place = 0; place < 16; place++)
        sscanf(digits + 2 * place, "%2hhx", &info->clusterUuid[place]);
    info->status = NVML_SUCCESS;
    info->cliqueId = clique;
    info->state = (unsigned char)state;
    info->healthMask = 0;
    return NVML_SUCCESS;
}

/* MIG: GPU instances are numbered from 1, as NVIDIA's tools often show them, compute instances from 0. */

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    REQUIRE(check_optional(device));
    *current = *pending = count_gpu_instances(device->gpu) >= 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    REQUIRE(check_optional(device));
    *count = count_gpu_instances(device->gpu) >= 0 ? MOST_MIG : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig)
{
    REQUIRE(check_optional(device));
    if (index >= MOST_MIG)
        return NVML_ERROR_INVALID_ARGUMENT;
    if ((int)index >= count_gpu_instances(device->gpu) * number("FAKE_NVML_MIG_SPLIT", 1))
        return NVML_ERROR_NOT_FOUND;
    *mig = &parts[device->gpu][index];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    REQUIRE(check_optional(device));
    *id = 1 + (unsigned int)(device->mig / number("FAKE_NVML_MIG_SPLIT", 1));
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    REQUIRE(check_optional(device));
    *id = (unsigned int)(device->mig % number("FAKE_NVML_MIG_SPLIT", 1));
    return NVML_SUCCESS;
}
