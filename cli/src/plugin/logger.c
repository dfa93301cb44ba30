/* NCCL's logger as a plugin gets it, formatting for Rust. Called on any of the plugin's threads. */

#include <stdarg.h>
#include <stdio.h>

void railhead_cli_log(int level, unsigned long flags, const char *file, int line, const char *message);

void railhead_cli_logger(int level, unsigned long flags, const char *file, int line, const char *format, ...) {
    char message[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    railhead_cli_log(level, flags, file, line, message);
}
