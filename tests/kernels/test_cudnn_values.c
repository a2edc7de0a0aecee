/* SPDX-License-Identifier: Apache-2.0
 *
 * What kernels/cudnn_values.def says of cuDNN's interface, beside the vendor's own header where there is one.
 */
#include "tests/check.h"

#if __has_include(<cudnn.h>)

#include <cudnn.h>

/* Some are deprecated, since newer versions do without; older ones do not. */
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#define LK_VALUE(name, value) \
    _Static_assert((int)(name) == (value), #name " has another value in cudnn.h");
#include "kernels/cudnn_values.def"
#undef LK_VALUE
_Static_assert(sizeof(cudnnStatus_t) == sizeof(int), "enums are passed as int");
_Static_assert(sizeof(cudnnBackendAttributeName_t) == sizeof(int), "enums are passed as int");
_Static_assert(sizeof(cudnnBackendDescriptor_t) == sizeof(void *), "descriptors are pointers");

int main(void)
{
    return 0;
}

#else

int main(void)
{
    printf("skipped: no cudnn.h, so its values were not compared\n");
    return LC_SKIP;
}

#endif
