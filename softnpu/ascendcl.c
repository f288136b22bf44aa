/* A host-memory stand-in for the Ascend runtime libraries that torch_npu links against.
 *
 * Device memory is host memory. Entry points that would launch a device kernel return an error, so that an operator
 * without a host implementation raises instead of returning garbage. softnpu/runtime.py builds this file and streams.c
 * once and gives them all the names torch_npu asks for. */
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime.h"

#define MAX_DEVICES 64
#define SERVER_DEVICES 8            /* of an Atlas 800T A2: what a list of visible devices may name */
#define DEVICE_MEMORY (64ull << 30) /* bytes a device, as on Atlas 800T A2 */

static __thread int device = 0;
static __thread int is_set; /* whether this thread has set a device; it has the first one of its process before */
static int first_device = -1;
static __thread void *context = (void *)0x1000;
static int active[MAX_DEVICES]; /* which devices this process has set */
__thread char message[1024]; /* of the last error, until it is asked for; only a launch has none */
static uint64_t in_use[MAX_DEVICES];
static uint64_t device_to_host_copies;

/* device and context */
static int current_device(void) { return is_set ? device : first_device < 0 ? 0 : first_device; }
aclError aclInit(const char *config) { return ACL_SUCCESS; }
aclError aclFinalize(void) { return ACL_SUCCESS; }
static int between(int least, int count) {
    return count < least ? least : count > MAX_DEVICES ? MAX_DEVICES : count;
}
/* Count the devices of the list before the first one that is not there: CANN makes only those visible. */
static int visible_devices(const char *list, int there) {
    int count = 0;
    for (char *end;; list = end + 1, count++) {
        long id = strtol(list, &end, 10);
        if (end == list || id < 0 || id >= there) return count;
        if (*end != ',') return count + 1;
    }
}
static int device_count(void) {
    const char *wanted = getenv("SOFTNPU_DEVICES"), *visible = getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (visible && *visible) return visible_devices(visible, wanted ? between(1, atoi(wanted)) : SERVER_DEVICES);
    if (!wanted) wanted = getenv("LOCAL_WORLD_SIZE"); /* torchrun starts a process for each device */
    return between(1, wanted ? atoi(wanted) : 1);
}
aclError aclrtGetDeviceCount(uint32_t *n) { *n = device_count(); return ACL_SUCCESS; }
aclError aclrtSetDevice(int id) {
    int count = device_count();
    if (id < 0 || id >= count) {
        if (count)
            snprintf(message, sizeof message, "There is no device %d: the software devices are 0 to %d. Set the environment "
                     "variable SOFTNPU_DEVICES to how many you want, at most %d.", id, count - 1, MAX_DEVICES);
        else
            snprintf(message, sizeof message, "There is no device %d: ASCEND_RT_VISIBLE_DEVICES names none of those there "
                     "are.", id);
        return ACL_ERROR_RT_INVALID_DEVICEID;
    }
    device = id;
    active[id] = is_set = 1;
    if (first_device < 0) first_device = id;
    context = (void *)(uintptr_t)(0x1000 + id);
    return ACL_SUCCESS;
}
aclError aclrtGetDevice(int *id) { *id = current_device(); return ACL_SUCCESS; }
aclError aclrtGetPrimaryCtxState(int id, uint32_t *flags, int *is_active) {
    if (id < 0 || id >= MAX_DEVICES) return ACL_ERROR_RT_INVALID_DEVICEID;
    if (flags) *flags = 0;
    *is_active = active[id];
    return ACL_SUCCESS;
}
aclError aclrtResetDevice(int id) { return ACL_SUCCESS; }
aclError aclrtGetCurrentContext(void **c) { *c = context; return ACL_SUCCESS; }
aclError aclrtSetCurrentContext(void *c) { context = c; return ACL_SUCCESS; }
aclError aclrtDeviceCanAccessPeer(int *yes, int a, int b) { *yes = 0; return ACL_SUCCESS; }
aclError aclrtDeviceGetBareTgid(int *pid) { *pid = getpid(); return ACL_SUCCESS; }
const char *aclrtGetSocName(void) { return "Ascend910B1"; }
/* Of an Ascend 910B1, as CANN's platform file of that name has them: AI cores, vector cores, bytes of L2. */
aclError aclGetDeviceCapability(uint32_t d, int what, int64_t *v) {
    static const int64_t values[] = {24, 48, 192 << 20};
    if (what < 0 || what > 2) return ACL_ERROR_RT_PARAM_INVALID;
    *v = values[what];
    return ACL_SUCCESS;
}
aclError aclrtGetDeviceResLimit(int d, int what, uint32_t *v) {
    int64_t all;
    aclError e = what > 1 ? ACL_ERROR_RT_PARAM_INVALID : aclGetDeviceCapability(d, what, &all);
    if (!e) *v = all;
    return e;
}
aclError aclrtGetStreamResLimit(void *stream, int what, uint32_t *v) { return aclrtGetDeviceResLimit(0, what, v); }
aclError aclrtGetVersion(int *a, int *b, int *c) { *a = 1; *b = 8; *c = 0; return ACL_SUCCESS; }
aclError aclrtGetSysParamOpt(int opt, int64_t *v) { *v = 0; return ACL_SUCCESS; }
aclError aclrtCtxGetSysParamOpt(int opt, int64_t *v) { *v = 0; return ACL_SUCCESS; }
/* The version of CANN and its packages, from 8.1 on, which brought the first of these calls. There is no driver. */
enum { PACKAGE_DRIVER = 7, VERSION_SIZE = 128 };
aclError aclsysGetCANNVersion(int package, char *version /* the first member of aclCANNPackageVersion */) {
    if (package == PACKAGE_DRIVER || strcmp(CANN_VERSION, "8.1") < 0) return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
    strncpy(version, CANN_VERSION, VERSION_SIZE - 1);
    return ACL_SUCCESS;
}
aclError aclsysGetVersionStr(char *package, char *version) { return aclsysGetCANNVersion(0, version); }
const char *aclGetRecentErrMsg(void) {
    static __thread char asked[sizeof message];
    strcpy(asked, *message ? message : "the software device has no kernel for this operator");
    *message = 0;
    return asked;
}
void softnpu_say(const char *what) { snprintf(message, sizeof message, "%s", what); }
size_t aclGetCompileoptSize(int opt) { return 16; }
aclError aclGetCompileopt(int opt, char *value, size_t size) { strncpy(value, "disable", size); return ACL_SUCCESS; }

/* memory */
aclError aclrtGetMemInfo(int kind, size_t *free_, size_t *total) {
    *total = DEVICE_MEMORY;
    *free_ = DEVICE_MEMORY - in_use[current_device()];
    return ACL_SUCCESS;
}
enum { PAGE = 4096 }; /* where memory of the host has to begin for the device to map it */
static aclError host_malloc(void **p, size_t n) {
    return posix_memalign(p, PAGE, n ? n : 512) ? ACL_ERROR_RT_MEMORY_ALLOCATION : ACL_SUCCESS;
}
/* A block remembers its device and size in the 512 bytes before it. */
struct block { uint64_t size; int device; };
aclError aclrtMalloc(void **p, size_t n, int policy) {
    char *start;
    if (n > DEVICE_MEMORY - in_use[current_device()] || host_malloc((void **)&start, n + 512)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    *(struct block *)start = (struct block){n, current_device()};
    __atomic_fetch_add(&in_use[current_device()], n, __ATOMIC_RELAXED);
    *p = start + 512;
    return ACL_SUCCESS;
}
aclError aclrtMallocAlign32(void **p, size_t n, int policy) { return aclrtMalloc(p, n, policy); }
aclError aclrtMallocHost(void **p, size_t n) { return host_malloc(p, n); }
aclError aclrtFree(void *p) {
    if (!p) return ACL_SUCCESS;
    char *start = (char *)p - 512;
    struct block *b = (struct block *)start;
    __atomic_fetch_sub(&in_use[b->device], b->size, __ATOMIC_RELAXED);
    free(start);
    return ACL_SUCCESS;
}
aclError aclrtFreeHost(void *p) { free(p); return ACL_SUCCESS; }
aclError aclrtMemset(void *p, size_t max, int v, size_t n) {
    if (unsafe_now()) return refuse_while_capturing("memory is set and waited for");
    memset(p, v, n);
    return ACL_SUCCESS;
}
aclError aclrtMemsetAsync(void *p, size_t max, int v, size_t n, void *stream) {
    if (in_capture(stream)) return tell(stream, MEMSET, p, NULL, n, v);
    memset(p, v, n);
    return ACL_SUCCESS;
}
static aclError copy(void *d, const void *s, size_t n, int kind) {
    if (kind == MEMCPY_DEVICE_TO_HOST) COUNT(device_to_host_copies);
    memmove(d, s, n);
    return ACL_SUCCESS;
}
aclError aclrtMemcpy(void *d, size_t max, const void *s, size_t n, int kind) {
    return unsafe_now() ? refuse_while_capturing("memory is copied and waited for") : copy(d, s, n, kind);
}
aclError aclrtMemcpyAsync(void *d, size_t max, const void *s, size_t n, int kind, void *stream) {
    return in_capture(stream) ? tell(stream, MEMCPY, d, s, n, 0) : copy(d, s, n, kind);
}

/* Virtual memory, of which torch_npu's expandable segments are made: reserved addresses have no access until a piece of
 * memory is mapped to them. A piece is a number of bytes of a device that nobody else may have; those it is mapped to are
 * the host's, and are lost when it is unmapped. */
struct range { char *start; size_t size; struct range *next; };
static struct range *reserved, *mapped;
static pthread_mutex_t ranges = PTHREAD_MUTEX_INITIALIZER;
static void note(struct range **list, void *start, size_t size) {
    struct range *r = malloc(sizeof *r);
    pthread_mutex_lock(&ranges);
    *r = (struct range){start, size, *list};
    *list = r;
    pthread_mutex_unlock(&ranges);
}
/* Take the range that starts there off the list, and return its size; 0 if there is none. */
static size_t forget(struct range **list, void *start) {
    size_t size = 0;
    pthread_mutex_lock(&ranges);
    while (*list && (*list)->start != start) list = &(*list)->next;
    struct range *found = *list;
    if (found) {
        size = found->size;
        *list = found->next;
        free(found);
    }
    pthread_mutex_unlock(&ranges);
    return size;
}
static void *without_access(void *start, size_t n, int fixed) {
    return mmap(start, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
}
aclError aclrtReserveMemAddress(void **p, size_t n, size_t alignment, void *wanted, uint64_t flags) {
    void *start = without_access(wanted, n, 0);
    if (start == MAP_FAILED) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    note(&reserved, *p = start, n);
    return ACL_SUCCESS;
}
aclError aclrtReleaseMemAddress(void *p) {
    size_t n = forget(&reserved, p);
    return n && !munmap(p, n) ? ACL_SUCCESS : ACL_ERROR_RT_PARAM_INVALID;
}
aclError aclrtMallocPhysical(struct block **piece, size_t n, const void *properties, uint64_t flags) {
    if (n > DEVICE_MEMORY - in_use[current_device()] || !(*piece = malloc(sizeof **piece))) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    **piece = (struct block){n, current_device()};
    __atomic_fetch_add(&in_use[current_device()], n, __ATOMIC_RELAXED);
    return ACL_SUCCESS;
}
aclError aclrtFreePhysical(struct block *piece) {
    __atomic_fetch_sub(&in_use[piece->device], piece->size, __ATOMIC_RELAXED);
    free(piece);
    return ACL_SUCCESS;
}
aclError aclrtMapMem(void *p, size_t n, size_t offset, struct block *piece, uint64_t flags) {
    if (offset + n > piece->size) return ACL_ERROR_RT_PARAM_INVALID;
    if (mprotect(p, n, PROT_READ | PROT_WRITE)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    note(&mapped, p, n);
    return ACL_SUCCESS;
}
aclError aclrtUnmapMem(void *p) {
    size_t n = forget(&mapped, p);
    return n && without_access(p, n, MAP_FIXED) == p ? ACL_SUCCESS : ACL_ERROR_RT_PARAM_INVALID;
}

/* Memory of the host that is registered: pinned, which any can be, or mapped, with the address that it has on the host. */
static struct range *registered;
enum { HOST_REGISTER_MAPPED = 2 };
aclError aclrtHostRegisterV2(void *p, uint64_t n, uint32_t flags) {
    if (!p || !n || (flags & HOST_REGISTER_MAPPED && (uintptr_t)p % PAGE)) return ACL_ERROR_RT_PARAM_INVALID;
    note(&registered, p, n);
    return ACL_SUCCESS;
}
aclError aclrtHostRegister(void *p, uint64_t n, int type, void **on_device) {
    *on_device = p;
    return aclrtHostRegisterV2(p, n, HOST_REGISTER_MAPPED);
}
aclError aclrtHostUnregister(void *p) { return forget(&registered, p) ? ACL_SUCCESS : ACL_ERROR_RT_PARAM_INVALID; }

/* settings and reports that need no action */
#define ACCEPT(name) aclError name(void) { return ACL_SUCCESS; }
ACCEPT(aclAppLog) ACCEPT(aclSetCompileopt) ACCEPT(aclrtSetDeviceSatMode) ACCEPT(aclrtSetOpExecuteTimeOut)
ACCEPT(aclrtSetSysParamOpt) ACCEPT(aclrtCtxSetSysParamOpt) ACCEPT(aclrtDeviceEnablePeerAccess) ACCEPT(aclrtProcessReport)
ACCEPT(aclmdlInitDump) ACCEPT(aclmdlSetDump) ACCEPT(aclmdlFinalizeDump)
ACCEPT(MsprofGetHashId) ACCEPT(MsprofRegisterCallback) ACCEPT(MsprofReportAdditionalInfo) ACCEPT(MsprofReportApi)
ACCEPT(HcclSetConfig) ACCEPT(MsprofReportCompactInfo) ACCEPT(MsprofSysCycleTime) ACCEPT(rtDevBinaryRegister) ACCEPT(rtFunctionRegister)

/* kernel launches and memory that processes share: refused */
#define REFUSE(name) aclError name(void) { return ACL_ERROR_FAILURE; }
REFUSE(rtKernelLaunch) REFUSE(rtGetC2cCtrlAddr)
REFUSE(aclrtBinaryGetFunction) REFUSE(aclrtBinaryLoadFromData) REFUSE(aclrtGetFunctionAddr)
REFUSE(aclrtMemExportToShareableHandle) REFUSE(aclrtMemImportFromShareableHandle)
REFUSE(aclrtMemSetPidToShareableHandle)

/* One kernel is there: Identity, by which torch_npu casts between formats. Every format holds the bytes of ND, at the
 * beginning of the larger memory that torch_npu allocates for it. */
struct buffer { void *data; size_t size; };
struct buffer *aclCreateDataBuffer(void *data, size_t size) {
    struct buffer *b = malloc(sizeof *b);
    if (b) *b = (struct buffer){data, size};
    return b;
}
aclError aclDestroyDataBuffer(struct buffer *b) { free(b); return ACL_SUCCESS; }
aclError aclopCompileAndExecute(const char *type, int inputs, void **input_descriptors, struct buffer **input, int outputs,
                                void **output_descriptors, struct buffer **output) {
    if (strcmp(type, "Identity") || inputs != 1 || outputs != 1) return ACL_ERROR_FAILURE;
    size_t n = input[0]->size < output[0]->size ? input[0]->size : output[0]->size;
    memmove(output[0]->data, input[0]->data, n);
    return ACL_SUCCESS;
}

/* descriptors of a kernel launch that is going to be refused */
#define NO_OBJECT(name) void *name(void) { return NULL; }
NO_OBJECT(aclCreateTensorDesc) NO_OBJECT(aclopCreateAttr)
ACCEPT(aclDestroyTensorDesc) ACCEPT(aclopDestroyAttr) ACCEPT(aclGetTensorDescDimV2)
ACCEPT(aclGetTensorDescFormat) ACCEPT(aclGetTensorDescNumDims) ACCEPT(aclGetTensorDescType) ACCEPT(aclSetTensorDescName)
ACCEPT(aclSetTensorFormat) ACCEPT(aclSetTensorPlaceMent) ACCEPT(aclSetTensorShape) ACCEPT(aclopSetAttrBool)
ACCEPT(aclopSetAttrDataType) ACCEPT(aclopSetAttrFloat) ACCEPT(aclopSetAttrInt) ACCEPT(aclopSetAttrListBool)
ACCEPT(aclopSetAttrListFloat) ACCEPT(aclopSetAttrListInt) ACCEPT(aclopSetAttrListListInt) ACCEPT(aclopSetAttrString)

/* Releases up to 2.10 are linked with BIND_NOW: whatever they name must be there when they are loaded.
 * Collectives are softnpu/hccl's, and never arrive here. 2.6 also names C++ of libgraph.so, whose registrations run as
 * static constructors. */
REFUSE(HcclAllGather) REFUSE(HcclAllReduce) REFUSE(HcclBroadcast) REFUSE(HcclCommDestroy) REFUSE(HcclCommInitAll)
REFUSE(HcclCommInitRootInfo) REFUSE(HcclGetRootInfo) REFUSE(HcclRecv) REFUSE(HcclReduceScatter) REFUSE(HcclSend)
ACCEPT(_ZN2ge12AscendStringC1EPKc) ACCEPT(_ZN2ge8OperatorC2EPKcS2_) ACCEPT(_ZN2ge8OperatorC2ERKNS_12AscendStringES3_)
ACCEPT(_ZN2ge23OperatorCreatorRegisterC1EPKcRKSt8functionIFNS_8OperatorERKNS_12AscendStringEEE)
ACCEPT(_ZN2ge8Operator12AttrRegisterEPKcb) ACCEPT(_ZN2ge8Operator12AttrRegisterEPKcl)
ACCEPT(_ZN2ge8Operator13InputRegisterEPKc) ACCEPT(_ZN2ge8Operator14OutputRegisterEPKc)
ACCEPT(_ZN2ge8Operator20DynamicInputRegisterEPKcjb) ACCEPT(_ZN2ge8Operator20RequiredAttrRegisterEPKc)
ACCEPT(_ZN2ge8Operator27DynamicInputRegisterByIndexEPKcjm)

/* counters, read by softnpu/counting.py */
uint64_t softnpu_device_to_host_copies(void) { return device_to_host_copies; }
