#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: real_libraries.py SONAME-OF-CUDART
The folders of the real NCCL and CUDA runtime, for programs that no Python has loaded them for: as LD_LIBRARY_PATH."""
import importlib.util
import glob
import os
import sys

spec = importlib.util.find_spec("nvidia")
places = [lib for root in (spec.submodule_search_locations if spec else ()) for lib in sorted(glob.glob(root + "/*/lib"))]
places += [os.environ[name] + "/lib" for name in ("NCCL_HOME", "CUDA_HOME") if name in os.environ]
places += ["/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"]
found = []
for library in ("libnccl.so.2", sys.argv[1]):
    hits = [place for place in places if os.path.exists(os.path.join(place, library))]
    if not hits:
        sys.exit("no %s in %s" % (library, ":".join(places)))
    found.append(hits[0])
print(":".join(dict.fromkeys(found)))
