/* SPDX-License-Identifier: Apache-2.0
 *
 * libloongtopo.so: what is connected to what inside a machine. A topology is a tree in the words of NCCL's topology
 * file: a system of NUMA nodes ("cpu"), PCI functions below them (bridges and switches, GPUs, NICs, NVSwitches),
 * a GPU or a NIC inside its PCI function, the ports ("net") inside a NIC, and links (NVLink, XGMI, C2C) that hang
 * below the GPU they start at. Only PCI functions on the way to a GPU or a NIC are kept when a machine is read.
 *
 * On top of it stand NCCL's own choices (routes), what a job's nodes put on their links (plan), and what is wrong with
 * a machine (findings).
 *
 * Everything that is read may be hostile: sizes and counts are bounded, and what is refused is refused with one line.
 * Nothing is logged. No state but what is allocated: several threads may use the library, one topology by one thread
 * at a time while it is loaded and freed; a loaded one is never changed, so any number of threads may read it. */
#ifndef LOONGTOPO_H
#define LOONGTOPO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#pragma GCC visibility push(default)

#define LC_TOPO_MAX_NODES 8192
#define LC_TOPO_MAX_FILE  ((size_t)8 << 20)
#define LC_TOPO_MAX_DEPTH 32
#define LC_TOPO_MAX_VALUE 254 /* bytes of an attribute's value; NCCL reads no more either */

enum lc_topo_type {
    LC_TOPO_SYSTEM, /* node 0, the root */
    LC_TOPO_CPU,    /* a NUMA node */
    LC_TOPO_PCI,
    LC_TOPO_GPU,
    LC_TOPO_NIC, /* groups the ports of a network card; below a CPU if it has no known PCI function */
    LC_TOPO_NET,    /* a port */
    LC_TOPO_NVLINK, /* these four are links of the node they hang below */
    LC_TOPO_XGMI,
    LC_TOPO_C2C,
    LC_TOPO_PCILINK,
};
#define LC_TOPO_TYPES 10

enum lc_topo_pci_kind {
    LC_TOPO_PCI_BRIDGE, /* a bridge, a switch, or of unknown class with something below it */
    LC_TOPO_PCI_GPU,
    LC_TOPO_PCI_NIC,
    LC_TOPO_PCI_NVSWITCH,
    LC_TOPO_PCI_OTHER,
};

enum lc_topo_format {
    LC_TOPO_NCCL,  /* <system version="1"> */
    LC_TOPO_RCCL,  /* <system version="2"> */
    LC_TOPO_HWLOC, /* exported by lstopo */
    LC_TOPO_SYSFS, /* a machine: this one, or a copy of its /sys and /proc */
};

#define LC_TOPO_UNKNOWN (-1)

struct lc_topo_cpu {
    int numa;      /* LC_TOPO_UNKNOWN: devices whose NUMA node nobody tells */
    uint64_t host; /* several machines of one file (NVLink across nodes) differ here */
    const char
        *cpus; /* affinity mask as text, words of 32 bits, the highest first; NULL: unknown */
    const char *arch, *vendor;
    int family, model;
};

struct lc_topo_pci {
    enum lc_topo_pci_kind kind;
    uint32_t class;                           /* 0: unknown */
    int vendor, device, subvendor, subdevice; /* LC_TOPO_UNKNOWN */
    double gts;                               /* link speed in GT/s per lane; 0: unknown */
    const char *speed;                        /* the same as text; NULL */
    int width;                                /* lanes; 0: unknown */
};

struct lc_topo_gpu {
    int dev, rank; /* LC_TOPO_UNKNOWN */
    int sm;        /* compute capability times 10; RCCL: number of compute units; LC_TOPO_UNKNOWN */
    bool gdr;      /* a NIC can reach its memory */
};

struct lc_topo_net {
    int dev; /* NCCL's number of it, LC_TOPO_UNKNOWN where none is given: NCCL leaves such a port out */
    int64_t mbps; /* 0: unknown */
    uint64_t guid;
    int port;
    bool gdr;
};

struct lc_topo_link {
    const char *target;    /* bus id, in lower case */
    int node;              /* the PCI node of that bus id; -1: not part of the topology */
    uint32_t target_class; /* 0: unknown */
    int count;             /* of NVLinks */
    int mbps;              /* of one C2C link, in MB/s as NCCL has it; else 0 */
};

struct lc_topo_node {
    enum lc_topo_type type;
    int parent, child, next; /* -1: none */
    int line;                /* of the file; 0: not from a file */
    const char *id; /* PCI: bus id in lower case; NET: name; CPU: number as text; else "" */
    union {
        struct lc_topo_cpu cpu;
        struct lc_topo_pci pci;
        struct lc_topo_gpu gpu;
        struct lc_topo_net net;
        struct lc_topo_link link;
    };
};

struct lc_topo;

/* Reads a topology. `path` is a file (the format is found out), or the folder that stands for / of a machine; NULL:
 * this machine. 0 or -errno; then `error` holds one line without newline, "FILE:LINE: what" where a line is known. */
int lc_topo_load(const char *path, struct lc_topo **out, char *error, size_t error_size);

/* The same, and a machine as NCCL reads it: what the kernel says of NUMA nodes is believed, also that there is none, and ports
 * that are no PCI functions themselves (virtio) hang below the first NUMA node. */
int lc_topo_load_as_nccl(const char *path, struct lc_topo **out, char *error, size_t error_size);

/* How many GPUs and ports that are in both hang below another NUMA node in `seen` than in `truth`, or have other types
 * of ways between them; ports count only where a GPU does. The first one is said in `why`. -ENOMEM or -E2BIG. */
int lc_topo_misplaced(const struct lc_topo *seen, const struct lc_topo *truth, char *why,
                      size_t size);

/* The same from memory; `name` stands for the file in messages. No folder. */
int lc_topo_load_text(const char *text, size_t size, const char *name, struct lc_topo **out,
                      char *error, size_t error_size);
void lc_topo_free(struct lc_topo *topo);

int lc_topo_count(const struct lc_topo *topo); /* of nodes, 1 at least */
const struct lc_topo_node *lc_topo_at(const struct lc_topo *topo, int index);
enum lc_topo_format lc_topo_format(const struct lc_topo *topo);
const char *lc_topo_name(const struct lc_topo *topo); /* file or folder; "this machine" */

/* An attribute as it was read, also one we have no field for; NULL: not there. */
const char *lc_topo_attribute(const struct lc_topo *topo, int index, const char *name);

/* The next node of that type behind `after` (-1: the first), in the order of the file; -1: none. */
int lc_topo_next(const struct lc_topo *topo, enum lc_topo_type type, int after);

/* The nearest node of that type above `index`, or itself; -1: none. */
int lc_topo_above(const struct lc_topo *topo, int index, enum lc_topo_type type);

/* GB/s of a PCI function's link by NCCL's table, which takes what is unknown for 16 lanes of 8 GT/s. */
double lc_topo_pci_gbps(const struct lc_topo_pci *pci);

/* What a reader should know: a partial file, a link that leads nowhere, an unknown tag. Without newline. */
int lc_topo_note_count(const struct lc_topo *topo);
const char *lc_topo_note(const struct lc_topo *topo, int number);

/* True for a template that NCCL completes on the machine: no GPU, or no network. */
bool lc_topo_is_partial(const struct lc_topo *topo);

/* Pictures and files of it. 0, or -errno: -EIO if the stream failed. JSON: "schema": "loongcomm.topology/1". */
int lc_topo_print_text(const struct lc_topo *topo, FILE *out);
int lc_topo_print_json(const struct lc_topo *topo, FILE *out);
int lc_topo_print_svg(const struct lc_topo *topo, FILE *out);

/* What NCCL_TOPO_FILE takes; of the version it was read with, else 1. Every attribute that was read is written.
 * -EILSEQ: a value holds a character that NCCL's reader cannot take (it knows no entities). */
int lc_topo_write_nccl(const struct lc_topo *topo, FILE *out);

/* The same, and no port has a higher speed than `most_mbps`. */
int lc_topo_write_nccl_slowed(const struct lc_topo *topo, int64_t most_mbps, FILE *out);

/* How NCCL sees the way between two devices, best first. The names are NCCL's. */
enum lc_topo_path_type {
    LC_TOPO_PATH_LOC, /* the same device */
    LC_TOPO_PATH_NVL, /* NVLink (XGMI) directly or through switches */
    LC_TOPO_PATH_NVB, /* NVLink through one GPU between */
    LC_TOPO_PATH_C2C, /* the link of a GPU to its CPU */
    LC_TOPO_PATH_PIX, /* one PCIe switch at most */
    LC_TOPO_PATH_PXB, /* several PCIe switches */
    LC_TOPO_PATH_P2C, /* C2C, then PCIe of that CPU */
    LC_TOPO_PATH_PXN, /* NVLink to another GPU, then PCIe */
    LC_TOPO_PATH_PHB, /* through a CPU's PCIe host bridge */
    LC_TOPO_PATH_SYS, /* from CPU to CPU */
    LC_TOPO_PATH_NET, /* over the network only */
    LC_TOPO_PATH_DIS, /* none */
};

struct lc_topo_path {
    enum lc_topo_path_type type;
    double gbps; /* GB/s of the narrowest link by NCCL's tables, 0 without a path */
    int hops;
};

struct lc_topo_paths;

/* Paths between all GPUs and ports by NCCL's search (2.28) and its bandwidths. These are the ways that the wires give:
 * the detours that NCCL then makes (through the CPU where peer access or GPUDirect are missing, PXN) are not in them,
 * so P2C and PXN do not occur; who plans routes adds them. Ports without a number are left out, as NCCL does.
 * `topo` must outlive it. 0, -ENOMEM, or -E2BIG where there are more nodes of a kind than NCCL can hold. */
int lc_topo_paths_find(const struct lc_topo *topo, struct lc_topo_paths **out);
void lc_topo_paths_free(struct lc_topo_paths *paths);

/* From one GPU or port to another, by their nodes. */
struct lc_topo_path lc_topo_path(const struct lc_topo_paths *paths, int from, int to);

/* The ports nearest to a GPU by NCCL's rule (highest bandwidth, then best type), in the order of the file; at most
 * `most` are written. Returns how many there are. */
int lc_topo_nearest_nets(const struct lc_topo_paths *paths, int gpu, int *out, int most);
const char *lc_topo_path_name(enum lc_topo_path_type type);

/* Asks for a variable of the environment that NCCL would see; NULL: not set. getenv serves. */
typedef char *(lc_topo_getter)(const char *name);

/* NCCL's settings that decide ways, as NCCL 2.28 reads them. */
enum lc_topo_policy {
    LC_TOPO_POLICY_AUTO,
    LC_TOPO_POLICY_ALL,
    LC_TOPO_POLICY_MAX,
};

struct lc_topo_nccl {
    int pxn_disable, p2p_pxn_level,
        pxn_c2c; /* NCCL_PXN_DISABLE, NCCL_P2P_PXN_LEVEL, NCCL_PXN_C2C */
    int cross_nic;
    enum lc_topo_policy policy; /* NCCL_NETDEVS_POLICY */
    int nets_per_gpu;           /* of MAX */
    int p2p_level, gdr_level;   /* a path type; LC_TOPO_UNKNOWN: not set */
    int gdr_read, gdr_c2c;      /* NCCL_NET_GDR_READ, NCCL_NET_GDR_C2C */
    int64_t
        most_mbps; /* a topology file that gives no port a higher speed; 0: the speeds as they are */
    bool policy_given, level_given, pxn_given, cross_given, file_given; /* by the user */
};

/* `get` NULL: NCCL's defaults. */
void lc_topo_nccl_read(lc_topo_getter *get, struct lc_topo_nccl *out);

/* The ways that NCCL takes in the end: those of the wires with its detours through the CPU where GPUs cannot reach each
 * other or a port cannot reach a GPU, P2C, and PXN; and its choice of ports. Where a file does not say whether a GPU or
 * a port can do GPUDirect, it is taken to. `topo` must outlive it. -E2BIG: more than 128 GPUs or 256 ports. */
struct lc_topo_routes;
int lc_topo_routes_find(const struct lc_topo *topo, const struct lc_topo_nccl *nccl,
                        struct lc_topo_routes **out);
void lc_topo_routes_free(struct lc_topo_routes *routes);
struct lc_topo_path lc_topo_routes_path(const struct lc_topo_routes *routes, int from, int to);

/* GPUs and ports by their place in the file; the nodes of them. */
int lc_topo_routes_gpus(const struct lc_topo_routes *routes);
int lc_topo_routes_nets(const struct lc_topo_routes *routes);
int lc_topo_routes_gpu(const struct lc_topo_routes *routes, int place);
int lc_topo_routes_net(const struct lc_topo_routes *routes, int place);

/* NCCL's own port of a GPU on a channel, by which it receives; -1: none. */
int lc_topo_own_net(const struct lc_topo_routes *routes, int gpu, int channel);

/* Of how many ports a GPU's channels take turns. */
int lc_topo_net_turns(const struct lc_topo_routes *routes, int gpu);

/* How a GPU sends to a GPU of another node with that NVML number: by which port, and whose memory the port reads. All by
 * place. relay == gpu: no PXN. net -1: no way. */
struct lc_topo_choice {
    int net, relay;
};
struct lc_topo_choice lc_topo_choose(const struct lc_topo_routes *routes, int gpu, int remote_dev,
                                     int channel);

/* What collectives of a job of such nodes go over, in GB/s of one direction. Ports are those that serve GPUs by NCCL's
 * choice, all of a node together, each no faster than its way to a GPU; inside a node it is the narrowest way that has to
 * be used to join all GPUs. 0: there is none (one GPU, no port), or no speed is known. */
struct lc_topo_wires {
    int gpus, nets;
    double inside_gbps, between_gbps;
    enum lc_topo_path_type type; /* of the way inside; LOC: one GPU, or none */
};
void lc_topo_routes_wires(const struct lc_topo_routes *routes, struct lc_topo_wires *out);

/* lc_topo_print_json's document with NCCL's ways between all GPUs and ports, and from them to NUMA nodes, and the ports
 * that each GPU's channels take in turn; by NCCL's variables. Also -ENOMEM, -E2BIG as lc_topo_routes_find. */
int lc_topo_print_json_paths(const struct lc_topo *topo, lc_topo_getter *get, FILE *out);

/* The same as a table of the ways that begin at GPUs. */
int lc_topo_print_paths(const struct lc_topo *topo, lc_topo_getter *get, FILE *out);

/* A job's nodes: so many that are alike, of each kind. GPUs of the job are counted through, in the order of the kinds
 * and of the files. */
struct lc_topo_kind {
    const struct lc_topo *topo;
    int nodes;
};
#define LC_TOPO_MAX_KINDS 16

enum lc_topo_side {
    LC_TOPO_NCCLS, /* with the user's settings, or NCCL's defaults */
    LC_TOPO_OURS,  /* with what follows from the plan as well; the same where that gains nothing */
};

/* What the most loaded direction of a link carries, as time at its nominal bandwidth. */
struct lc_topo_load {
    double ms;
    char link[96];
};

struct lc_topo_side_loads {
    struct lc_topo_load
        all_to_all; /* each GPU sends 1 GB in equal parts to the GPUs of all other nodes */
    struct lc_topo_load
        all_reduce; /* of 1 GB: a ring for each port that NCCL would use, shared by their speeds */
    double
        between_rails; /* of the all-to-all's bytes: how many leave and arrive by ports of different rails */
};

struct lc_topo_setting {
    const char *name, *value; /* value "": a topology file, see lc_topo_plan_most_mbps */
};

/* Compares what NCCL's settings and a topology file can express, by NCCL's own rules, and takes what has the smallest
 * load on the most loaded link in an all-to-all; never what has more than NCCL's in any of lc_topo_side_loads, and never
 * another value for what the user has set (`get`; NULL: nothing is set). Bytes inside a node do not count, the network
 * between nodes is taken to be wide enough, and the parts of a message to spread over channels evenly. Rails are ports
 * of different nodes nearest to a GPU of the same number. The kinds' topologies must outlive it.
 * 0, -ENOMEM, -E2BIG as lc_topo_routes_find, -EINVAL: a kind without GPUs or ports, with two GPUs of one NVML number
 * (several machines in one file), or one node in all. */
struct lc_topo_plan;
int lc_topo_plan_make(const struct lc_topo_kind *kinds, int count, lc_topo_getter *get,
                      struct lc_topo_plan **out);
void lc_topo_plan_free(struct lc_topo_plan *plan);
struct lc_topo_side_loads lc_topo_plan_loads(const struct lc_topo_plan *plan,
                                             enum lc_topo_side side);
int lc_topo_plan_gpus(const struct lc_topo_plan *plan);

/* What follows; 0: NCCL's own is the best of what can be expressed. */
int lc_topo_plan_setting_count(const struct lc_topo_plan *plan);
struct lc_topo_setting lc_topo_plan_setting(const struct lc_topo_plan *plan, int number);

/* The highest speed that a topology file for this plan may give a port; 0: none is needed. */
int64_t lc_topo_plan_most_mbps(const struct lc_topo_plan *plan);

/* One way of the job, found in a table: ports and relay by place in their node's file. net -1: inside a node. */
struct lc_topo_hop {
    int net, relay, remote_net;
    bool same_rail;
};
struct lc_topo_hop lc_topo_plan_hop(const struct lc_topo_plan *plan, enum lc_topo_side side,
                                    int from, int to, int channel);

/* Both sides' loads and what follows, as text. 0 or -EIO. */
int lc_topo_plan_print(const struct lc_topo_plan *plan, const char *name, FILE *out);

/* Is there anything to plan: NVLink, and several ports with numbers? */
bool lc_topo_is_plannable(const struct lc_topo *topo);

/* --- what is wrong with a machine --- */

enum lc_topo_severity { /* by harm */
    LC_TOPO_FINE,
    LC_TOPO_INFO,
    LC_TOPO_WARNING,
    LC_TOPO_ERROR,
};

/* One finding; `remedy` is "" where there is nothing to do. Texts live until it returns; bytes from files and from the
 * environment are in them as they are. */
typedef void(lc_topo_report)(void *arg, enum lc_topo_severity severity, const char *id,
                             const char *evidence, const char *remedy);

struct lc_topo_checks {
    const char *root; /* the folder that stands for / of that machine; NULL: there is only a file */
    lc_topo_getter *get;  /* NCCL's variables; NULL: none are set */
    const char *affinity; /* CPUs that the job may use, as lc_topo_cpu's; NULL: not known */
};

/* Reports what is wrong, the most harmful of each severity first. A machine without GPUs is fine. 0 or -ENOMEM. */
int lc_topo_examine(const struct lc_topo *topo, const struct lc_topo_checks *checks,
                    lc_topo_report *report, void *arg);

/* Made-up machines that show what plans are for. NULL behind the last. */
const char *lc_topo_sample_name(int number);
int lc_topo_sample(const char *name, struct lc_topo **out);

#pragma GCC visibility pop

#endif
