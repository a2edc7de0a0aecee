/* SPDX-License-Identifier: Apache-2.0 */
#include LC_HEADER

int main(void)
{
    return 0;
}
