/* The mutant's init, devices and properties, and the loading of the real plugin. */
#include "mutant.h"

#include <dlfcn.h>
#include <stdio.h>

int version;
struct net_v4 *net4;
struct net_v8 *net8;
struct net_v12 *net12;
int finalized;

void load(int wanted) {
    const char *path = getenv("MUTANT_OF");
    void *library = path != NULL ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (library == NULL) {
        fprintf(stderr, "MUTANT_OF: %s\n", path != NULL ? dlerror() : "not set");
        exit(3);
    }
    version = wanted;
    net4 = dlsym(library, "ncclNetPlugin_v4");
    net8 = dlsym(library, "ncclNetPlugin_v8");
    net12 = dlsym(library, "ncclNetPlugin_v12");
}

result m_finished(void) { return finalized && is("finalize_all") ? INTERNAL_ERROR : SUCCESS; }

result m_init(void **ctx, uint64_t id, struct comm_config *config, logger log, profiler profile) {
    if (is("init_fails")) {
        log(2, 0x10, __FILE__, __LINE__, "%s", "mutant: no init today");
        return SYSTEM_ERROR;
    }
    if (is("init_once") && finalized)
        return INTERNAL_ERROR;
    switch (version) {
    case 4: return net4->init(log);
    case 8: return net8->init(log);
    default: return net12->init(ctx, id, config, log, profile);
    }
}

result m_finalize(void *ctx) {
    finalized = 1;
    if (is("finalize_hangs"))
        hang();
    return net12->finalize(ctx);
}

result m_attributes(void *ctx, struct net_attr *attributes) {
    if (is("attributes_hang"))
        hang();
    return net12->setNetAttr(ctx, attributes);
}

result m_devices(int *n) {
    static int calls;
    result r = REAL(devices(n));
    if (is("no_device"))
        *n = 0;
    if (is("devices_vary"))
        *n += calls++ % 2;
    if (is("same_name"))
        *n += 1;
    return r;
}

/* A device that "same_name" adds is the one before it once more. */
static int real_device(int dev) { return is("same_name") && dev > 0 ? dev - 1 : dev; }

#define SPOIL(p) do { \
        static int asked; \
        if (is("no_name")) (p)->name = ""; \
        if (is("null_name")) (p)->name = NULL; \
        if (is("no_host")) (p)->ptrSupport = 2; \
        if (is("speed_0")) (p)->speed = 0; \
        if (is("speed_varies")) (p)->speed += asked++; \
        if (is("no_comms")) (p)->maxComms = 0; \
    } while (0)

result m_properties4(int dev, struct props_v4 *props) {
    result r = net4->getProperties(real_device(dev), props);
    SPOIL(props);
    return r;
}
result m_properties8(int dev, struct props_v8 *props) {
    result r = net8->getProperties(real_device(dev), props);
    SPOIL(props);
    if (is("no_recvs")) props->maxRecvs = 0;
    if (is("odd_device")) props->netDeviceType = 9;
    return r;
}
result m_properties12(int dev, struct props_v12 *props) {
    result r = net12->getProperties(real_device(dev), props);
    SPOIL(props);
    if (is("no_recvs")) props->maxRecvs = 0;
    if (is("odd_device")) props->netDeviceType = 9;
    if (is("vprops_empty")) props->vProps.ndevs = 0;
    if (is("vprops_wild")) props->vProps.devs[0] = 1000;
    return r;
}
