/* SPDX-License-Identifier: Apache-2.0
 *
 * libloongtopo.so: what is connected to what inside a machine. A topology is a tree in the words of NCCL's topology
 * file: a system of NUMA nodes ("cpu"), PCI functions below them (bridges and switches, GPUs, NICs, NVSwitches),
 * a GPU or a NIC inside its PCI function, the ports ("net") inside a NIC, and links (NVLink, XGMI, C2C) that hang
 * below the GPU they start at. Only PCI functions on the way to a GPU or a NIC are kept when a machine is read.
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

#pragma GCC visibility pop

#endif
