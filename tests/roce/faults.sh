# SPDX-License-Identifier: Apache-2.0
#
# Ports that go down and come back, and lost packets: over one rail and over two, of which one is left.
export NCCL_IB_HCA=xh1r0,xh2r0 LOONGCOMM_LOG_LEVEL=info
timeout 900 ./test_verbs ports loss || exit 1
timeout 900 ./test_verbs worker || exit 1
LOONGCOMM_NET_TIMEOUT=10 timeout 900 ./test_verbs deadline gone || exit 1
export NCCL_IB_HCA=xh NCCL_NET_FORCE_MERGE="xh1r0,xh1r1;xh2r0,xh2r1" LCTEST_RAILS=2
timeout 900 ./test_verbs ports || exit 1
