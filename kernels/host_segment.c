/* SPDX-License-Identifier: Apache-2.0
 *
 * Segments of the host library: memory files, sealed at their size, so that no peer can make an access of ours fail by
 * cutting them. */
#include "kernels/list_internal.h"
#include "kernels/rings.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

/* 0: there is no such size. */
static size_t whole_pages(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);

    return bytes > (size_t)INT64_MAX - page ? 0 : (bytes + page - 1) / page * page;
}

static int map(int fd, size_t size, void **out)
{
    void *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (address == MAP_FAILED)
        return -errno;
    *out = address;
    return 0;
}

LK_API int lk_segment_new(size_t bytes, void *stream, void **address, int *fd)
{
    size_t size = whole_pages(bytes);
    int file, err;

    if (!size)
        return -EINVAL;
    file = memfd_create("loongkernels-segment", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file < 0)
        return -errno;
    if (ftruncate(file, (off_t)size) || fcntl(file, F_ADD_SEALS, SEALS)) {
        err = -errno;
        goto close_file;
    }
    err = map(file, size, address);
    if (err)
        goto close_file;
    *fd = file;
    return 0;

close_file:
    close(file);
    return err;
}

LK_API int lk_segment_map(int fd, size_t bytes, void **address)
{
    size_t size = whole_pages(bytes);
    struct stat file;

    if (!size || fstat(fd, &file) || !S_ISREG(file.st_mode) || file.st_uid != geteuid() ||
        (size_t)file.st_size != size || fcntl(fd, F_GET_SEALS) != SEALS)
        return -EINVAL;
    return map(fd, size, address);
}

LK_API int lk_segment_free(void *address, size_t bytes)
{
    size_t size = whole_pages(bytes);

    return !address || !size ? -EINVAL : munmap(address, size) ? -errno : 0;
}
