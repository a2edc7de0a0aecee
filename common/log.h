/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_COMMON_LOG_H
#define LC_COMMON_LOG_H

enum lc_log_level {
    LC_LOG_ERROR,
    LC_LOG_WARN,
    LC_LOG_INFO,
    LC_LOG_DEBUG,
    LC_LOG_TRACE,
};

/* Receives one finished line, without a newline. Must not allocate, log or call a hooked function. */
typedef void lc_log_sink(enum lc_log_level level, const char *file, int line, const char *text);

/* Written while the process is set up (lc_log_set_level), read by every thread without ordering:
 * a line more or less around the change is harmless. */
extern enum lc_log_level lc_log_max;

void lc_log_set_level(enum lc_log_level level);

/* NULL: back to standard error. */
void lc_log_set_sink(lc_log_sink *sink);

/* Appends every later line to a file (created with mode 0600). Returns -errno and keeps the current
 * sink on failure; the caller decides what to say. */
int lc_log_open_file(const char *path);

__attribute__((format(printf, 4, 5))) void lc_log_write(enum lc_log_level level, const char *file,
                                                        int line, const char *fmt, ...);

#define LC_LOG(level, ...)                                               \
    do {                                                                 \
        if (__builtin_expect((int)(level) <= (int)lc_log_max, 0))        \
            lc_log_write((level), __FILE_NAME__, __LINE__, __VA_ARGS__); \
    } while (0)

#ifndef __FILE_NAME__
#define __FILE_NAME__ \
    (__builtin_strrchr(__FILE__, '/') ? __builtin_strrchr(__FILE__, '/') + 1 : __FILE__)
#endif

#define lc_error(...) LC_LOG(LC_LOG_ERROR, __VA_ARGS__)
#define lc_warn(...)  LC_LOG(LC_LOG_WARN, __VA_ARGS__)
#define lc_info(...)  LC_LOG(LC_LOG_INFO, __VA_ARGS__)
#define lc_debug(...) LC_LOG(LC_LOG_DEBUG, __VA_ARGS__)
#define lc_trace(...) LC_LOG(LC_LOG_TRACE, __VA_ARGS__)

/* At most once per process and place. */
#define lc_warn_once(...)                                         \
    do {                                                          \
        static unsigned char lc_said_;                            \
        if (!__atomic_exchange_n(&lc_said_, 1, __ATOMIC_RELAXED)) \
            lc_warn(__VA_ARGS__);                                 \
    } while (0)

#endif
