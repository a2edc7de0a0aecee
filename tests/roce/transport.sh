# SPDX-License-Identifier: Apache-2.0
#
# The verbs transport over one rail, then with connections that are striped over two.
export NCCL_IB_HCA=xh1r0,xh2r0
timeout 900 ./test_verbs sizes many tags flush long closes open strangers || exit 1
export NCCL_IB_HCA=xh NCCL_NET_FORCE_MERGE="xh1r0,xh1r1;xh2r0,xh2r1"
timeout 900 ./test_verbs many tags flush || exit 1
