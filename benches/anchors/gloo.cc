// Gloo's allreduces and barriers for `make bench-mesh` (benches/mesh.py), which starts a process for each rank: over TCP on loopback, or on
// an RDMA device.
//
// Usage: gloo WHAT ELEMENTS WARMUP SECONDS RANK RANKS FOLDER WAY [DEVICE] (see bench.h). The folder is the ranks' to meet in; the way is one
// of Gloo's algorithms, with "-sync" behind it if the caller's thread is to poll, instead of sleeping until Gloo's has read what came. An
// RDMA device has the older algorithms only, the names of which begin with "old-".

#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gloo/algorithm.h>
#include <gloo/allreduce.h>
#include <gloo/allreduce_bcube.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring.h>
#include <gloo/allreduce_ring_chunked.h>
#include <gloo/barrier.h>
#include <gloo/barrier_all_to_all.h>
#include <gloo/barrier_all_to_one.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/rendezvous/prefix_store.h>
#include <gloo/transport/ibverbs/device.h>
#include <gloo/transport/tcp/device.h>

#include "bench.h"

namespace {

using Context = std::shared_ptr<gloo::rendezvous::Context>;
using Run = std::function<void()>;
using Reduce = void (*)(void *, const void *, const void *, size_t);

struct Contestant {
    Run run;
    Context control;
};

// A function, with options that are made once.
Run allreduce(const Context &context, const job &job, gloo::AllreduceOptions::Algorithm algorithm) {
    auto options = std::make_shared<gloo::AllreduceOptions>(context);
    options->setOutput(job.data, job.elements);
    options->setAlgorithm(algorithm);
    options->setReduceFunction(static_cast<Reduce>(&gloo::sum<float>));
    return [options] { gloo::allreduce(*options); };
}

// An object that has its buffers.
template <class Algorithm> Run object(std::shared_ptr<Algorithm> algorithm) {
    return [algorithm] { algorithm->run(); };
}

template <class Algorithm> Run allreduce(const Context &context, const job &job) {
    return object(std::make_shared<Algorithm>(context, std::vector<float *>{job.data}, static_cast<int>(job.elements)));
}

Run barrier(const Context &context) {
    auto options = std::make_shared<gloo::BarrierOptions>(context);
    return [options] { gloo::barrier(*options); };
}

Run contestant(const Context &context, const job &job, const std::string &way) {
    using Algorithm = gloo::AllreduceOptions::Algorithm;
    const std::map<std::string, std::function<Run()>> allreduces = {
        {"auto", [&] { return allreduce(context, job, Algorithm::UNSPECIFIED); }},
        {"ring", [&] { return allreduce(context, job, Algorithm::RING); }},
        {"bcube", [&] { return allreduce(context, job, Algorithm::BCUBE); }},
        {"old-ring", [&] { return allreduce<gloo::AllreduceRing<float>>(context, job); }},
        {"old-ring-chunked", [&] { return allreduce<gloo::AllreduceRingChunked<float>>(context, job); }},
        {"old-halving-doubling", [&] { return allreduce<gloo::AllreduceHalvingDoubling<float>>(context, job); }},
        {"old-bcube", [&] { return allreduce<gloo::AllreduceBcube<float>>(context, job); }},
    };
    const std::map<std::string, std::function<Run()>> barriers = {
        {"auto", [&] { return barrier(context); }},
        {"old-all-to-all", [&] { return object(std::make_shared<gloo::BarrierAllToAll>(context)); }},
        // Rank 0 measures, so another one is the root.
        {"old-all-to-one", [&] { return object(std::make_shared<gloo::BarrierAllToOne>(context, 1)); }},
    };
    return (job.barrier ? barriers : allreduces).at(way)();
}

void run(void *self) {
    static_cast<Contestant *>(self)->run();
}

void agree(void *self, uint64_t *number) {
    gloo::BroadcastOptions options(static_cast<Contestant *>(self)->control);
    options.setOutput(number, 1);
    options.setRoot(0);
    gloo::broadcast(options);
}

void meet(void *self) {
    barrier(static_cast<Contestant *>(self)->control)();
}

} // namespace

int main(int argc, char **argv) try {
    if (argc != 9 && argc != 10)
        fail("usage: gloo WHAT ELEMENTS WARMUP SECONDS RANK RANKS FOLDER WAY [DEVICE]");
    const struct job job = job_from(argv, std::stoi(argv[5]), std::stoi(argv[6]));
    gloo::transport::tcp::attr attr;
    attr.iface = "lo";
    const auto tcp = gloo::transport::tcp::CreateDevice(attr);
    auto fast = tcp;
    // Its second address is the IPv4 one.
    if (argc == 10)
        fast = gloo::transport::ibverbs::CreateDevice({argv[9], 1, 1});
    gloo::rendezvous::FileStore store(argv[7]);
    const auto connected = [&](const char *prefix, std::shared_ptr<gloo::transport::Device> device) {
        gloo::rendezvous::PrefixStore keys(prefix, store);
        auto context = std::make_shared<gloo::rendezvous::Context>(job.rank, job.ranks);
        context->connectFullMesh(keys, device);
        return context;
    };
    std::string way = argv[8];
    const auto suffix = way.find("-sync");
    // What ranks agree by needs Gloo's thread.
    const Context control = connected("control", tcp), context = connected("context", fast);
    if (suffix != std::string::npos) {
        way.resize(suffix);
        for (int rank = 0; rank < job.ranks; rank++)
            if (rank != job.rank)
                context->getPair(rank)->setSync(true, true);
    }
    Contestant self = {contestant(context, job, way), control};
    const struct way by = {run, agree, meet, &self};
    measure(&job, &by);
    // Nobody hangs up on a rank that is not done.
    meet(&self);
    return 0;
} catch (const std::exception &error) {
    std::cerr << error.what() << std::endl;
    return 1;
}
