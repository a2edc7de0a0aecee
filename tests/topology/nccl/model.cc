// SPDX-License-Identifier: Apache-2.0
//
// NCCL's own model of a machine, without GPUs: built by compare.py from a checkout of NCCL's source (2.28). Prints what
// test_nccl prints for the same file: ways, own ports by channel, ports and relays towards GPUs of other nodes.
#include "comm.h"
#include "core.h"
#include "graph.h"
#include "topo.h"
#include "transport.h"
#include "xml.h"

#include <cstdarg>

int ncclDebugLevel = NCCL_LOG_WARN;
uint64_t ncclDebugMask = 0;
FILE *ncclDebugFile = stderr;
thread_local int ncclDebugNoWarn = 0;

void ncclDebugLog(ncclDebugLogLevel level, unsigned long, const char *, int, const char *fmt, ...)
{
    va_list args;

    if (level != NCCL_LOG_WARN || ncclDebugNoWarn)
        return;
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    fputc('\n', stderr);
    va_end(args);
}

const char *ncclGetEnv(const char *name)
{
    return getenv(name);
}

void ncclLoadParam(const char *env, int64_t dflt, int64_t, int64_t *cache)
{
    const char *text = getenv(env);

    *cache = text && *text ? strtoll(text, nullptr, 0) : dflt;
}

// What NCCL would add on the machine: ranks, and what it asks GPUs and ports for.
static void complete(ncclXmlNode *node, int *rank)
{
    const char *have = nullptr;

    if (strcmp(node->name, "gpu") == 0) {
        xmlSetAttrInt(node, "rank", *rank);
        xmlGetAttr(node, "dev", &have);
        if (!have)
            xmlSetAttrInt(node, "dev", *rank);
        (*rank)++;
    }
    if (strcmp(node->name, "gpu") == 0 || strcmp(node->name, "net") == 0) {
        xmlGetAttr(node, "gdr", &have);
        if (!have)
            xmlSetAttrInt(node, "gdr", 1);
    }
    for (int i = 0; i < node->nSubs; i++)
        complete(node->subs[i], rank);
}

static const char *const kinds[] = {"GPU", "PCI", "NVS", "CPU", "NIC", "NET"};

static void print_ways(ncclTopoSystem *system, ncclTopoNode *from)
{
    static const char *const types[] = {"LOC", "NVL", "NVB", "C2C", "PIX", "PXB",
                                        "P2C", "PXN", "PHB", "SYS", "NET", "DIS"};

    for (int type : {GPU, CPU, NET}) {
        for (int i = 0; from->paths[type] && i < system->nodes[type].count; i++) {
            ncclTopoLinkList *path = from->paths[type] + i;

            if (path->type == PATH_DIS)
                continue;
            printf("%s/%lx %s/%lx (%d/%.1f/%s)\n", kinds[from->type],
                   NCCL_TOPO_ID_LOCAL_ID(from->id), kinds[type],
                   NCCL_TOPO_ID_LOCAL_ID(system->nodes[type].nodes[i].id), path->count, path->bw,
                   types[path->type]);
        }
    }
}

static void print_choices(ncclTopoSystem *system)
{
    ncclComm *comm = (ncclComm *)calloc(1, sizeof(*comm));
    int gpus = system->nodes[GPU].count;
    int dev;
    int64_t id;

    comm->topo = system;
    comm->peerInfo = (ncclPeerInfo *)calloc(gpus + 1, sizeof(*comm->peerInfo));
    for (int i = 0; i <= gpus; i++)
        comm->peerInfo[i].nvmlDev = i;
    for (int rank = 0; rank < gpus; rank++) {
        printf("own %d:", rank);
        for (int channel = 0; channel < 8; channel++) {
            dev = -1;
            (void)ncclTopoGetLocalNet(system, rank, channel, &id, &dev);
            printf(" %d", dev);
        }
        puts("");
        for (int peer = 0; peer <= gpus && dev >= 0; peer++) {
            for (int channel = 0; channel < 4; channel++) {
                int relay;

                if (ncclTopoGetNetDev(comm, rank, NULL, channel, peer, &id, &dev, &relay) == 0)
                    printf("send %d %d %d: %d %d\n", rank, peer, channel, dev, relay);
            }
        }
    }
}

int main(int, char **argv)
{
    ncclXml *xml;
    ncclXmlNode *node;
    ncclTopoSystem *system;
    int rank = 0;

    setenv("NCCL_IGNORE_DISABLED_P2P", "2", 1);
    if (xmlAlloc(&xml, NCCL_TOPO_XML_MAX_NODES) || ncclTopoGetXmlFromFile(argv[1], xml, 1) ||
        xml->maxIndex == 0)
        return 1;
    for (xmlFindTag(xml, "cpu", &node); node; xmlFindNextTag(xml, "cpu", node, &node))
        xmlSetAttrLong(node, "host_hash", 1);
    complete(xml->nodes, &rank);
    if (ncclTopoGetSystemFromXml(xml, &system, 1) || ncclTopoComputePaths(system, NULL) ||
        ncclTopoSearchInit(system))
        return 1;
    for (int type : {GPU, NET}) {
        for (int i = 0; i < system->nodes[type].count; i++)
            print_ways(system, system->nodes[type].nodes + i);
    }
    if (system->nodes[NET].count)
        print_choices(system);
    return 0;
}
