/* The header stands alone, in C11 and in C++17: nothing is included before it. Fails if library and header are of different releases. */
#include "../include/railhead.h"

#include <stdio.h>
#include <string.h>

/* Memory that a peer on the same host maps: ordinary, zeroed, whole pages. */
static int memory_works(void)
{
    size_t size = 10000, i;
    unsigned char *memory = (unsigned char *)railhead_alloc(size);
    int good = memory != NULL && (uintptr_t)memory % 4096 == 0;
    for (i = 0; good && i < size; i++)
        good = memory[i] == 0;
    if (good)
        memset(memory, 0xa5, size);
    railhead_free(memory);
    railhead_free(NULL);
    return good;
}

int main(void)
{
    char expected[64];
    const char *version = railhead_version();
    (void)snprintf(expected, sizeof expected, "%d.%d.%d", RAILHEAD_VERSION_MAJOR, RAILHEAD_VERSION_MINOR, RAILHEAD_VERSION_PATCH);
    printf("header %s, library %s\n", expected, version);
    return strcmp(version, expected) == 0 && memory_works() ? 0 : 1;
}
