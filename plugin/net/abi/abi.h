/* SPDX-License-Identifier: Apache-2.0
 *
 * What NCCL looks for in a network plugin: a data object `ncclNetPlugin_vN` of type `struct lc_nccl_net_vN`.
 * The layouts are facts about NCCL 2.18 to 2.32, stated here so that nothing of NCCL is needed to build, and
 * pinned below. Members keep NCCL's spelling. What is not repeated has not changed since the version before:
 *
 *   v6   2.18  first one that every release since then loads, and the last without device offload
 *   v7   2.19  device handles, getDeviceMr, irecvConsumed
 *   v8   2.20  size_t for regMr, regIsGlobal
 *   v9   2.24  size_t for isend and irecv, makeVDevice, largest message sizes
 *   v10  2.26  configuration of a connection, profiler
 *   v11  2.28  one init per communicator with a context of its own, finalize, setNetAttr
 *   v12  2.30  eight devices per virtual one, rails
 *
 * NCCL takes the newest that it knows. It opens the library with RTLD_NOW | RTLD_LOCAL and does not mind versions
 * that it does not find. Its functions return int-sized results, and must not return LC_NCCL_IN_PROGRESS. */
#ifndef LC_PLUGIN_NET_ABI_H
#define LC_PLUGIN_NET_ABI_H

#include <stddef.h>
#include <stdint.h>

enum lc_nccl_result {
    LC_NCCL_SUCCESS = 0,
    LC_NCCL_UNHANDLED_CUDA_ERROR = 1,
    LC_NCCL_SYSTEM_ERROR = 2,
    LC_NCCL_INTERNAL_ERROR = 3,
    LC_NCCL_INVALID_ARGUMENT = 4,
    LC_NCCL_INVALID_USAGE = 5,
    LC_NCCL_REMOTE_ERROR = 6,
    LC_NCCL_IN_PROGRESS = 7,
};

enum lc_nccl_log_level {
    LC_NCCL_LOG_NONE = 0,
    LC_NCCL_LOG_VERSION = 1,
    LC_NCCL_LOG_WARN = 2,
    LC_NCCL_LOG_INFO = 3,
    LC_NCCL_LOG_ABORT = 4,
    LC_NCCL_LOG_TRACE = 5,
};

#define LC_NCCL_LOG_INIT 0x1UL /* subsystems, for NCCL_DEBUG_SUBSYS */
#define LC_NCCL_LOG_NET  0x10UL

#define LC_NCCL_PTR_HOST   0x1
#define LC_NCCL_PTR_CUDA   0x2
#define LC_NCCL_PTR_DMABUF 0x4

#define LC_NCCL_HANDLE_BYTES 128
#define LC_NCCL_MAX_REQUESTS \
    32 /* receive groups in flight on a connection; times maxRecvs for sends */
#define LC_NCCL_MAX_BYTES_V8 ((size_t)1 << 30) /* NCCL sends no larger message to v8 and older */
#define LC_NCCL_MAX_BYTES    ((size_t)1 << 40) /* v9 and newer may not report more */

/* In *request on entry of irecv (2.24 and newer): nobody will wait for this receive. */
#define LC_NCCL_OPTIONAL_RECV_COMPLETION ((void *)0x1)

#define LC_NCCL_NET_DEVICE_HOST 0
#define LC_NCCL_UNDEFINED       (-1)

typedef void lc_nccl_logger(enum lc_nccl_log_level level, unsigned long subsystems,
                            const char *file, int line, const char *fmt, ...);
typedef enum lc_nccl_result lc_nccl_profiler(void **event, int type, void *parent, int64_t id,
                                             void *data);

struct lc_nccl_net_device_handle {
    int netDeviceType;
    int netDeviceVersion;
    void *handle;
    size_t size;
    int needsProxyProgress;
};

/* The strings belong to the plugin: NCCL keeps the pointers for as long as the library is loaded. */
struct lc_nccl_props_v6 {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int speed;
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
};

struct lc_nccl_props_v7 {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int speed;
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
    int netDeviceType;
    int netDeviceVersion;
};

struct lc_nccl_props_v8 {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int regIsGlobal;
    int speed;
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
    int netDeviceType;
    int netDeviceVersion;
};

struct lc_nccl_vdevice_v9 {
    int ndevs;
    int devs[4];
};

struct lc_nccl_props_v9 {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int regIsGlobal;
    int forceFlush;
    int speed;
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
    int netDeviceType;
    int netDeviceVersion;
    struct lc_nccl_vdevice_v9 vProps;
    size_t maxP2pBytes;
    size_t maxCollBytes;
};

struct lc_nccl_props_v11 {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int regIsGlobal;
    int forceFlush;
    int speed;
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
    int netDeviceType;
    int netDeviceVersion;
    struct lc_nccl_vdevice_v9 vProps;
    size_t maxP2pBytes;
    size_t maxCollBytes;
    int maxMultiRequestSize;
};

struct lc_nccl_vdevice_v12 {
    int ndevs;
    int devs[8];
};

struct lc_nccl_props_v12 {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int regIsGlobal;
    int forceFlush;
    int speed;
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
    int netDeviceType;
    int netDeviceVersion;
    struct lc_nccl_vdevice_v12 vProps;
    size_t maxP2pBytes;
    size_t maxCollBytes;
    int maxMultiRequestSize;
    int16_t railId;
    int16_t planeId;
};

struct lc_nccl_comm_config {
    int trafficClass;
};

struct lc_nccl_comm_attr {
    int32_t maxConcurrentPeers;
    int32_t minConcurrentPeers;
    int32_t maxFlowsPerPeer;
    int32_t minFlowsPerPeer;
};

struct lc_nccl_net_attr {
    struct lc_nccl_comm_attr sendCommAttr;
    struct lc_nccl_comm_attr recvCommAttr;
    uint32_t op;
    uint32_t algo;
    uint32_t proto;
};

/* Members of one version after another; the macros hold runs that several versions share. */
#define LC_NCCL_REGISTER(size_type)                                                            \
    enum lc_nccl_result (*regMr)(void *comm, void *data, size_type size, int type, void **mr); \
    enum lc_nccl_result (*regMrDmaBuf)(void *comm, void *data, size_t size, int type,          \
                                       uint64_t offset, int fd, void **mr);                    \
    enum lc_nccl_result (*deregMr)(void *comm, void *mr)

#define LC_NCCL_TRANSFER(size_type)                                                           \
    enum lc_nccl_result (*isend)(void *comm, void *data, size_type size, int tag, void *mr,   \
                                 void **request);                                             \
    enum lc_nccl_result (*irecv)(void *comm, int n, void **data, size_type *sizes, int *tags, \
                                 void **mrs, void **request)

#define LC_NCCL_TRANSFER_PROFILED                                                          \
    enum lc_nccl_result (*isend)(void *comm, void *data, size_t size, int tag, void *mr,   \
                                 void *event, void **request);                             \
    enum lc_nccl_result (*irecv)(void *comm, int n, void **data, size_t *sizes, int *tags, \
                                 void **mrs, void **events, void **request)

#define LC_NCCL_COMPLETE                                                                  \
    enum lc_nccl_result (*iflush)(void *comm, int n, void **data, int *sizes, void **mrs, \
                                  void **request);                                        \
    enum lc_nccl_result (*test)(void *request, int *done, int *sizes);                    \
    enum lc_nccl_result (*closeSend)(void *comm);                                         \
    enum lc_nccl_result (*closeRecv)(void *comm);                                         \
    enum lc_nccl_result (*closeListen)(void *comm)

#define LC_NCCL_OFFLOAD                                                   \
    enum lc_nccl_result (*getDeviceMr)(void *comm, void *mr, void **out); \
    enum lc_nccl_result (*irecvConsumed)(void *comm, int n, void *request)

struct lc_nccl_net_v6 {
    const char *name;
    enum lc_nccl_result (*init)(lc_nccl_logger *log);
    enum lc_nccl_result (*devices)(int *out);
    enum lc_nccl_result (*getProperties)(int dev, struct lc_nccl_props_v6 *out);
    enum lc_nccl_result (*listen)(int dev, void *handle, void **out);
    enum lc_nccl_result (*connect)(int dev, void *handle, void **out);
    enum lc_nccl_result (*accept)(void *listener, void **out);
    LC_NCCL_REGISTER(int);
    LC_NCCL_TRANSFER(int);
    LC_NCCL_COMPLETE;
};

struct lc_nccl_net_v7 {
    const char *name;
    enum lc_nccl_result (*init)(lc_nccl_logger *log);
    enum lc_nccl_result (*devices)(int *out);
    enum lc_nccl_result (*getProperties)(int dev, struct lc_nccl_props_v7 *out);
    enum lc_nccl_result (*listen)(int dev, void *handle, void **out);
    enum lc_nccl_result (*connect)(int dev, void *handle, void **out,
                                   struct lc_nccl_net_device_handle **device);
    enum lc_nccl_result (*accept)(void *listener, void **out,
                                  struct lc_nccl_net_device_handle **device);
    LC_NCCL_REGISTER(int);
    LC_NCCL_TRANSFER(int);
    LC_NCCL_COMPLETE;
    LC_NCCL_OFFLOAD;
};

struct lc_nccl_net_v8 {
    const char *name;
    enum lc_nccl_result (*init)(lc_nccl_logger *log);
    enum lc_nccl_result (*devices)(int *out);
    enum lc_nccl_result (*getProperties)(int dev, struct lc_nccl_props_v8 *out);
    enum lc_nccl_result (*listen)(int dev, void *handle, void **out);
    enum lc_nccl_result (*connect)(int dev, void *handle, void **out,
                                   struct lc_nccl_net_device_handle **device);
    enum lc_nccl_result (*accept)(void *listener, void **out,
                                  struct lc_nccl_net_device_handle **device);
    LC_NCCL_REGISTER(size_t);
    LC_NCCL_TRANSFER(int);
    LC_NCCL_COMPLETE;
    LC_NCCL_OFFLOAD;
};

struct lc_nccl_net_v9 {
    const char *name;
    enum lc_nccl_result (*init)(lc_nccl_logger *log);
    enum lc_nccl_result (*devices)(int *out);
    enum lc_nccl_result (*getProperties)(int dev, struct lc_nccl_props_v9 *out);
    enum lc_nccl_result (*listen)(int dev, void *handle, void **out);
    enum lc_nccl_result (*connect)(int dev, void *handle, void **out,
                                   struct lc_nccl_net_device_handle **device);
    enum lc_nccl_result (*accept)(void *listener, void **out,
                                  struct lc_nccl_net_device_handle **device);
    LC_NCCL_REGISTER(size_t);
    LC_NCCL_TRANSFER(size_t);
    LC_NCCL_COMPLETE;
    LC_NCCL_OFFLOAD;
    enum lc_nccl_result (*makeVDevice)(int *out, struct lc_nccl_vdevice_v9 *parts);
};

struct lc_nccl_net_v10 {
    const char *name;
    enum lc_nccl_result (*init)(lc_nccl_logger *log, lc_nccl_profiler *profiler);
    enum lc_nccl_result (*devices)(int *out);
    enum lc_nccl_result (*getProperties)(int dev, struct lc_nccl_props_v9 *out);
    enum lc_nccl_result (*listen)(int dev, void *handle, void **out);
    enum lc_nccl_result (*connect)(int dev, struct lc_nccl_comm_config *config, void *handle,
                                   void **out, struct lc_nccl_net_device_handle **device);
    enum lc_nccl_result (*accept)(void *listener, void **out,
                                  struct lc_nccl_net_device_handle **device);
    LC_NCCL_REGISTER(size_t);
    LC_NCCL_TRANSFER_PROFILED;
    LC_NCCL_COMPLETE;
    LC_NCCL_OFFLOAD;
    enum lc_nccl_result (*makeVDevice)(int *out, struct lc_nccl_vdevice_v9 *parts);
};

/* v11 and v12 differ in what getProperties and makeVDevice take. */
#define LC_NCCL_NET_V11(props_version, vdevice_version)                                            \
    const char *name;                                                                              \
    enum lc_nccl_result (*init)(void **context, uint64_t comm_id,                                  \
                                struct lc_nccl_comm_config *config, lc_nccl_logger *log,           \
                                lc_nccl_profiler *profiler);                                       \
    enum lc_nccl_result (*devices)(int *out);                                                      \
    enum lc_nccl_result (*getProperties)(int dev, struct lc_nccl_props_##props_version *out);      \
    enum lc_nccl_result (*listen)(void *context, int dev, void *handle, void **out);               \
    enum lc_nccl_result (*connect)(void *context, int dev, void *handle, void **out,               \
                                   struct lc_nccl_net_device_handle **device);                     \
    enum lc_nccl_result (*accept)(void *listener, void **out,                                      \
                                  struct lc_nccl_net_device_handle **device);                      \
    LC_NCCL_REGISTER(size_t);                                                                      \
    LC_NCCL_TRANSFER_PROFILED;                                                                     \
    LC_NCCL_COMPLETE;                                                                              \
    LC_NCCL_OFFLOAD;                                                                               \
    enum lc_nccl_result (*makeVDevice)(int *out, struct lc_nccl_vdevice_##vdevice_version *parts); \
    enum lc_nccl_result (*finalize)(void *context);                                                \
    enum lc_nccl_result (*setNetAttr)(void *context, struct lc_nccl_net_attr *attr)

struct lc_nccl_net_v11 {
    LC_NCCL_NET_V11(v11, v9);
};

struct lc_nccl_net_v12 {
    LC_NCCL_NET_V11(v12, v12);
};

#define LC_NCCL_AT(type, member, offset) \
    _Static_assert(offsetof(struct lc_nccl_##type, member) == (offset), #type "." #member)
#define LC_NCCL_SIZE(type, size) \
    _Static_assert(sizeof(struct lc_nccl_##type) == (size), "size of " #type)

_Static_assert(sizeof(enum lc_nccl_result) == sizeof(int), "results are returned as int");
LC_NCCL_SIZE(net_device_handle, 32);
LC_NCCL_SIZE(net_attr, 44);
LC_NCCL_SIZE(comm_config, 4);

LC_NCCL_SIZE(props_v6, 48);
LC_NCCL_AT(props_v6, speed, 28);
LC_NCCL_AT(props_v6, latency, 36);
LC_NCCL_AT(props_v6, maxRecvs, 44);
LC_NCCL_SIZE(props_v7, 56);
LC_NCCL_AT(props_v7, netDeviceType, 48);
LC_NCCL_SIZE(props_v8, 64);
LC_NCCL_AT(props_v8, regIsGlobal, 28);
LC_NCCL_AT(props_v8, latency, 40);
LC_NCCL_AT(props_v8, netDeviceVersion, 56);
LC_NCCL_SIZE(props_v9, 104);
LC_NCCL_AT(props_v9, forceFlush, 32);
LC_NCCL_AT(props_v9, maxRecvs, 52);
LC_NCCL_AT(props_v9, vProps, 64);
LC_NCCL_AT(props_v9, maxP2pBytes, 88);
LC_NCCL_SIZE(props_v11, 112);
LC_NCCL_AT(props_v11, maxMultiRequestSize, 104);
LC_NCCL_SIZE(props_v12, 128);
LC_NCCL_AT(props_v12, maxP2pBytes, 104);
LC_NCCL_AT(props_v12, maxMultiRequestSize, 120);
LC_NCCL_AT(props_v12, railId, 124);
LC_NCCL_AT(props_v12, planeId, 126);

/* One pointer after another, so one offset late in each pins the members before it by count. */
LC_NCCL_SIZE(net_v6, 17 * sizeof(void *));
LC_NCCL_AT(net_v6, closeListen, 16 * sizeof(void *));
LC_NCCL_SIZE(net_v7, 19 * sizeof(void *));
LC_NCCL_AT(net_v7, irecvConsumed, 18 * sizeof(void *));
LC_NCCL_SIZE(net_v8, 19 * sizeof(void *));
LC_NCCL_AT(net_v8, regMr, 7 * sizeof(void *));
LC_NCCL_SIZE(net_v9, 20 * sizeof(void *));
LC_NCCL_AT(net_v9, makeVDevice, 19 * sizeof(void *));
LC_NCCL_SIZE(net_v10, 20 * sizeof(void *));
LC_NCCL_AT(net_v10, isend, 10 * sizeof(void *));
LC_NCCL_SIZE(net_v11, 22 * sizeof(void *));
LC_NCCL_AT(net_v11, test, 13 * sizeof(void *));
LC_NCCL_AT(net_v11, finalize, 20 * sizeof(void *));
LC_NCCL_AT(net_v11, setNetAttr, 21 * sizeof(void *));
LC_NCCL_SIZE(net_v12, 22 * sizeof(void *));
LC_NCCL_AT(net_v12, makeVDevice, 19 * sizeof(void *));
LC_NCCL_AT(net_v12, finalize, 20 * sizeof(void *));

#undef LC_NCCL_AT
#undef LC_NCCL_SIZE
#endif
