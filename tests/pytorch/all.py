# SPDX-License-Identifier: Apache-2.0
"""All job scripts in turn, in one process per rank: starting Python, torch and NCCL costs seconds each time."""
import importlib
import sys

import job

SCRIPTS = ["collectives", "coalesced", "ddp_transformer", "moe_padded", "moe_uneven", "fsdp2",
           "graph_capture"]


def main():
    names = sys.argv[1:] or SCRIPTS
    job.start(eager=True)
    records = {}
    for name in names:
        records[name] = job.run_case(name, importlib.import_module(name).main)
        if job.dist.get_rank() == 0:
            print("%s: %.1f s" % (name, records[name].seconds), flush=True)
    sys.exit(job.finish(records))


if __name__ == "__main__":
    main()
