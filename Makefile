# What a user or a developer does with Railhead. Cargo builds; this file knows the rest.
#
#   make deps      the Debian packages that the library is built with; make deps-test: those of the tests, too
#   make build     target/release/librailhead.so and target/release/railhead, the command line program
#   make demo      two processes move verified data through it, over shared memory and over TCP
#   make test      everything once, and the plugin's tests again with RAILHEAD_PROGRESS=thread
#   make test-gpu  two ranks of NCCL on this machine's GPU, through the plugin, and the proxy between two kernels
#   make soak      random traffic and faults for STRESS seconds, a long watch over the ready flag, the multi-process and fault tests ROUNDS times
#   make bench     the table of all speed targets, and docs/perf.svg
#   make bench-nccl  the plugin beside the Socket inside NCCL's own library, over shared memory and over TCP
#   make bench-proxy   what the proxy costs: throughput against the plugin without it, idle time, crowds, wake-up
#   make bench-rails   what rails that fail cost: throughput meanwhile and afterwards, and how long nothing moves
#   make bench-store   the store's server beside torch's, one client for both
#   make bench-mesh    the mesh beside Gloo and Open MPI, and beside what this machine's memory allows
#   make bench-tensor  tensors beside the plugin itself, gRPC, and what this machine's memory allows
#   make bench-bounds  the least that any plugin does over TCP, beside a bare socket
#   make bench-torch   the backend of torch.distributed beside torch's gloo
#   make wheel     the Python package with the library in it, into target/wheel
#   make instructions  what an 8-byte message costs in instructions, by callgrind, and how many of them are for counting
#   make fuzz      random bytes to what the store's server and the mesh's ranks read with, for SECONDS (default 60)
#   make sim       schedules in a simulated world, with faults, for SECONDS (default 600) on all cores: docs/simulation.md
#   make mutants   rules of how a link goes on without a rail, left out one by one: the simulator must find each, in SCHEDULES (default 100000)
#   make header    include/railhead.h from src/abi
#   make docs      docs/env.md from src/base/config.rs
#   make install   into PREFIX (and below DESTDIR)

CARGO ?= cargo
PREFIX ?= /usr/local
ROUNDS ?= 20
# Flow-control slots that a reader follows in `make soak`, on each wire.
PUBLISHES ?= 100000000
# Seconds of random traffic and faults in `make soak`: see tests/stress.rs for how to repeat what fails.
STRESS ?= 600

# They share the time of `make fuzz`.
FUZZ_TARGETS := store_wire mesh_control mesh_address

# What builds the library: libclang, cmake and the rest are ibverbs-sys's. Nothing of it is needed to run.
PACKAGES := gcc libc6-dev make cmake pkg-config python3 libclang-dev libibverbs-dev
# What the tests use besides: sanitisers and tools, where torch is installed, a launcher of ranks (20 MB), and the virtual machine
# that has RDMA devices, which fetches the rest itself.
TEST_PACKAGES := $(PACKAGES) g++ libc6-dbg binutils valgrind iproute2 util-linux procps tmux python3-venv openmpi-bin \
    qemu-system-x86 apt xz-utils
# NCCL's own library, from NVIDIA's package.
NCCL := target/nccl/nvidia/nccl/lib/libnccl.so.2
LIBRARY := target/release/librailhead.so
PROGRAM := target/release/railhead
# Tests run a library with the fault-injection stages and the simulated fabric compiled in; it has a directory of its own, so that it never replaces the plain one.
# With --workspace everywhere, or all of it is built again for other features of the dependencies.
STAGED := --workspace --profile staged --features stages,sim --target-dir target/stages
# Tests are chosen beside a target of the program's: where all that are asked for are the library's, cargo takes fewer features of what
# both depend on, and builds all again.
CHOSEN := $(STAGED) --bin railhead
SOAK := --test plugin --test store
# Most tests wait most of the time.
export RUST_TEST_THREADS ?= $(shell expr 3 '*' $$(nproc))
# Tests of the plugin, which all hold with a thread of each device too; the others do not ask for one, or build programs of their own,
# or take long for what a thread does not change.
THREADED := --test plugin --test library -- library::misuse $(addprefix plugin::,basic concurrency faults handshake hostile last_call mapped \
    multi_recv namespaces progress rails ready_flag reload stages stall) \
    $(addprefix --skip ,a_flipped_bit a_damaged_handle nine_tenths_of_the_limit nothing_is_touched)
# Those that wait most, and do not ask for the plain library, come first, while others have work for the processors.
WAITING := store verbs
TESTS := $(filter-out softroce plugin commands $(WAITING),$(basename $(notdir $(wildcard tests/*.rs cli/tests/*.rs))))
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
PINGPONG := c_examples/build/plugin_pingpong --plugin $(LIBRARY)

.PHONY: deps deps-test library build examples demo test test-machine test-plugin test-thread test-gpu soak bench bench-nccl bench-proxy bench-rails bench-store bench-mesh bench-tensor bench-bounds bench-torch wheel instructions fuzz sim mutants header docs install clean

# $(1): packages; $(2): commands that tell of them where there is no dpkg.
define installed
@if command -v dpkg-query >/dev/null; then \
    missing=; \
    for p in $(1); do \
        dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q 'install ok installed' || missing="$$missing $$p"; \
    done; \
    if [ -n "$$missing" ]; then \
        sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
        echo "== installs$$missing"; \
        $$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
    fi; \
else \
    for c in $(2); do \
        command -v $$c >/dev/null || echo "make $@: $$c is missing and this is not Debian: install it by hand"; \
    done; \
fi
@command -v $(firstword $(CARGO)) >/dev/null || { echo "make $@: no cargo; install Rust 1.88 or later (https://rustup.rs)"; exit 1; }
endef

deps:
	$(call installed,$(PACKAGES),gcc make cmake pkg-config python3)

deps-test:
	$(call installed,$(TEST_PACKAGES),gcc g++ make nm readelf valgrind ip unshare cmake pkg-config python3 qemu-system-x86_64)

library:
	$(CARGO) build --release --package railhead

build:
	$(CARGO) build --release --workspace

examples: build
	$(MAKE) --no-print-directory -C c_examples

# Loopback is left out of the choice where there is anything else, and so are interfaces of containers; if these are all there is, loopback it is.
demo: deps library
	@$(MAKE) --no-print-directory -C c_examples pingpong
	@if [ -z "$$RAILHEAD_SOCKET_IFNAME$$NCCL_SOCKET_IFNAME" ] && \
	    ! ip -o addr show up scope global 2>/dev/null | awk '{print $$2}' | grep -qvE '^(lo|docker|virbr|veth)'; then \
	    export NCCL_SOCKET_IFNAME=lo; \
	fi; \
	for wire in shm tcp; do \
	    echo; echo "== RAILHEAD_SOFT_WIRE=$$wire $(PINGPONG)"; \
	    RAILHEAD_SOFT_WIRE=$$wire $(PINGPONG) || exit 1; \
	done

# TEST_ARGS: for the test programs, such as --show-output or part of a name. Each part has a process group of its own, so that none is left behind by a
# signal.
test: deps-test
	@echo "== the tests"
	$(CARGO) test $(STAGED) --no-run
	@echo "== those in the virtual machine, beside all that follows, and the plain library, beside those that wait most: both speak later"
	@said=$$(mktemp -d) || exit 1; \
	    groups=; \
	    trap 'for group in $$groups; do kill -- -$$group || kill $$group; done 2>/dev/null; rm -rf $$said' EXIT; \
	    trap 'exit 1' HUP INT QUIT TERM; \
	    start() { setsid "$$@" & groups="$$groups $$!"; }; \
	    start $(MAKE) --no-print-directory test-machine > $$said/machine 2>&1; machine=$$!; \
	    start $(MAKE) --no-print-directory library > $$said/library 2>&1; library=$$!; \
	    start $(CARGO) test $(CHOSEN) --no-fail-fast $(addprefix --test ,$(WAITING)) -- $(TEST_ARGS); wait $$!; failed=$$?; \
	    wait $$library; built=$$?; \
	    cat $$said/library; \
	    if [ $$built = 0 ]; then \
	        echo "== the examples"; \
	        $(MAKE) --no-print-directory -C c_examples || failed=$$?; \
	        echo "== all other tests, beside those of the plugin and its pass with RAILHEAD_PROGRESS=thread, which speak later"; \
	        export RH_LIBRARY=$(abspath $(LIBRARY)); \
	        start $(MAKE) --no-print-directory --keep-going -j1 test-plugin test-thread > $$said/plugin 2>&1; plugin=$$!; \
	        start $(CARGO) test $(STAGED) --no-fail-fast --lib --bins $(addprefix --test ,$(TESTS)) -- $(TEST_ARGS); wait $$! || failed=$$?; \
	        echo "== those of the program"; \
	        start $(CARGO) test $(STAGED) --no-fail-fast --test commands -- $(TEST_ARGS); wait $$! || failed=$$?; \
	        wait $$plugin || failed=$$?; \
	        echo "== of the plugin"; \
	        cat $$said/plugin; \
	    fi; \
	    wait $$machine || failed=$$?; \
	    echo "== in the virtual machine"; \
	    cat $$said/machine; \
	    [ $$failed = 0 ] && [ $$built = 0 ]

test-machine:
	$(CARGO) test $(STAGED) --test softroce -- $(TEST_ARGS)

test-plugin:
	$(CARGO) test $(CHOSEN) --no-fail-fast --test plugin -- $(TEST_ARGS)

test-thread:
	@echo "== RAILHEAD_PROGRESS=thread"
	RAILHEAD_PROGRESS=thread RHT_PROGRESS=thread $(CARGO) test $(CHOSEN) --no-fail-fast $(THREADED) $(TEST_ARGS)

# `make test` leaves it out: machines that build have no GPU. Needs torch with CUDA, and nvcc for the second part; each says SKIP without.
test-gpu: build
	python3 tests/gpu/nccl.py $(LIBRARY) $(TEST_ARGS)
	@if ! command -v nvcc >/dev/null; then echo "SKIP: the proxy between two kernels: no nvcc"; exit 0; fi; set -e; \
	$(MAKE) --no-print-directory -C c_examples cuda; \
	for wire in shm tcp; do \
	    NCCL_SOCKET_IFNAME=lo RAILHEAD_SOFT_WIRE=$$wire timeout 120 c_examples/build/proxy_cuda; \
	done

soak: deps-test examples
	@$(CARGO) test $(STAGED) --no-run
	@echo "== random traffic and faults for $(STRESS) s"
	@RHT_STRESS_SECONDS=$(STRESS) $(CARGO) test --quiet $(CHOSEN) --test stress -- --nocapture --exact random_episodes
	@echo "== $(PUBLISHES) slots, none torn"
	@RHT_PUBLISHES=$(PUBLISHES) $(CARGO) test --quiet $(CHOSEN) --test conformance -- --exact soft_shm::publish::no_torn_slot
	@RHT_PUBLISHES=$(PUBLISHES) $(CARGO) test --quiet $(CHOSEN) --lib a_reader_of_slots_that_come_byte_by_byte_sees_none_torn
	@echo "== 10000 lives of a queue pair on each provider"
	@RHT_LIVES=10000 $(CARGO) test --quiet $(CHOSEN) --test conformance a_thousand_lives
	@echo "== 1000 connections of each kind, of which one side closes at once"
	@RHT_ROUNDS=1000 $(CARGO) test --quiet $(CHOSEN) --test plugin plugin::close_first
	@echo "== every mutant in every version, perf in every version, the largest messages, rates beside those that perf measures"
	@RHT_SOAK=1 $(CARGO) test --quiet $(CHOSEN) --test commands -- --include-ignored commands::check commands::perf::ranges commands::perf::every_version commands::top::rates
	@echo "== a mesh of 256 ranks on each wire"
	@RHT_SOAK=1 $(CARGO) test --quiet $(CHOSEN) --test commands -- commands::mesh::many_ranks
	@echo "== ranks that are killed, 100 times in each collective on each wire"
	@RHT_SOAK=1 $(CARGO) test --quiet $(CHOSEN) --test library -- library::mesh_faults
	@for round in $$(seq $(ROUNDS)); do \
	    echo "== round $$round of $(ROUNDS)"; \
	    RHT_SOAK=1 $(CARGO) test --quiet $(CHOSEN) $(SOAK) || exit 1; \
	done

# BENCH_ARGS: for the program, such as --rounds 25 or --json.
bench: build
	$(PROGRAM) perf --targets --plugin $(LIBRARY) --sizes 8,64,512,4K,16K,64K,256K,1M,4M,16M --plot docs/perf.svg $(BENCH_ARGS)

$(NCCL):
	@rm -rf target/nccl && python3 -m venv target/nccl/venv
	@target/nccl/venv/bin/pip download --quiet --disable-pip-version-check --no-deps --dest target/nccl nvidia-nccl-cu12==2.32.3
	@python3 -m zipfile -e target/nccl/nvidia_nccl_cu12-*.whl target/nccl/part
	@mv target/nccl/part/nvidia target/nccl/

# BENCH_ARGS: as above.
bench-nccl: deps-test build
	-@$(MAKE) --no-print-directory $(NCCL)
	@if [ -e $(NCCL) ]; then \
	    for wire in shm tcp; do \
	        echo; echo "== RAILHEAD_SOFT_WIRE=$$wire"; \
	        RAILHEAD_SOFT_WIRE=$$wire $(PROGRAM) perf --plugin $(LIBRARY) --compare nccl:$(NCCL) --sizes 8,64K,1M $(or $(BENCH_ARGS),--rounds 15) || exit 1; \
	    done; \
	else \
	    echo "SKIP: NCCL's library (nvidia-nccl-cu12) cannot be had"; \
	fi

bench-proxy:
	$(CARGO) bench --quiet $(STAGED) --bench proxy

# BENCH_ARGS: --rounds N.
bench-rails: deps-test
	$(CARGO) bench --quiet $(subst --profile staged,--profile sim,$(STAGED)) --bench rails -- $(BENCH_ARGS)

# BENCH_ARGS: --rounds N.
bench-store: deps-test build
	python3 tests/torch/bench.py $(PROGRAM) $(CARGO) bench --quiet $(STAGED) --bench store -- $(BENCH_ARGS)

# What cannot be installed is skipped. BENCH_ARGS: --rounds N, --seconds S, --only TEXT or --json.
bench-mesh: build
	-$(call installed,g++ libgloo-dev)
	-$(call installed,gcc libc6-dev openmpi-bin libopenmpi-dev)
	@python3 benches/mesh.py $(PROGRAM) target/anchors $(BENCH_ARGS)

# BENCH_ARGS: --rounds N, --seconds S, --only TEXT or --json.
bench-tensor: deps-test build
	@$(CARGO) bench --quiet --profile release --bench tensor --no-run
	@python3 benches/tensor.py $(PROGRAM) $(LIBRARY) target/anchors $(BENCH_ARGS) -- $(CARGO) bench --quiet --profile release --bench tensor

# BENCH_ARGS: ROUNDS SECONDS.
bench-bounds:
	@mkdir -p target/anchors
	@$(CC) -O3 -Wall -Wextra -o target/anchors/tcp_bounds benches/anchors/tcp_bounds.c
	@target/anchors/tcp_bounds $(BENCH_ARGS)

# BENCH_ARGS: --rounds N or --only TEXT.
bench-torch: deps-test library
	@python=$$(python3 tests/torch/setup.py target/torch) || { echo "SKIP: $$python"; exit 0; }; \
	PYTHONPATH=python RAILHEAD_LIBRARY=$(abspath $(LIBRARY)) $$python benches/python.py $(BENCH_ARGS)

wheel: library
	@python3 python/build.py $(LIBRARY) target/wheel && ls target/wheel/*.whl

instructions: deps-test build
	RH_LIBRARY=$(abspath $(LIBRARY)) $(CARGO) bench --quiet $(STAGED) --bench instructions

# What cargo-fuzz does, without it. The address sanitiser is an option of the nightly compiler, which this one takes for it.
fuzz: FUZZED := --cfg fuzzing -Cdebug-assertions -Ccodegen-units=4 -Zsanitizer=address -Cpasses=sancov-module \
    $(addprefix -Cllvm-args=-sanitizer-coverage-,level=4 inline-8bit-counters pc-table trace-compares)
fuzz: deps-test
	@mkdir -p $(addprefix target/fuzz/found/,$(FUZZ_TARGETS))
	@cd fuzz && for target in $(FUZZ_TARGETS); do \
	    echo "== $$target"; \
	    RUSTC_BOOTSTRAP=1 RUSTFLAGS="$(FUZZED)" $(CARGO) run --release --bin $$target --target-dir ../target/fuzz \
	        --target "$$(rustc -vV | sed -n 's/^host: //p')" -- -max_total_time=$$(( $(or $(SECONDS),60) / $(words $(FUZZ_TARGETS)) + 1 )) \
	        -artifact_prefix=../target/fuzz/ ../target/fuzz/found/$$target corpus/$$target || exit 1; \
	done

sim: deps
	@program=$$($(CARGO) test $(subst --profile staged,--profile sim,$(CHOSEN)) --test sim --no-run --message-format=json | sed -n 's|.*"executable":"\([^"]*/sim-[^"]*\)".*|\1|p') && \
	    "$$program" --for $(or $(SECONDS),600)

# Each is a build: some twenty minutes.
mutants: deps
	@CARGO="$(CARGO)" python3 tests/mutants.py --schedules $(or $(SCHEDULES),100000)

header:
	RH_UPDATE=1 $(CARGO) test --quiet --features header --test library -- --exact library::artifact::header_is_what_the_source_gives

docs:
	RH_UPDATE=1 $(CARGO) test --quiet --test library -- --exact library::artifact::environment_page_is_what_the_table_gives

# Links, not copies: a process that loads two copies has two sets of state.
install: build
	install -d $(DESTDIR)$(PREFIX)/lib/pkgconfig $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/bin
	install -m 755 $(PROGRAM) $(DESTDIR)$(PREFIX)/bin/railhead
	install -m 755 $(LIBRARY) $(DESTDIR)$(PREFIX)/lib/librailhead.so
	ln -sf librailhead.so $(DESTDIR)$(PREFIX)/lib/libnccl-net-railhead.so
	ln -sf librailhead.so $(DESTDIR)$(PREFIX)/lib/librccl-net-railhead.so
	install -m 644 include/railhead.h include/railhead_ring.h $(DESTDIR)$(PREFIX)/include
	sed 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|' railhead.pc.in > $(DESTDIR)$(PREFIX)/lib/pkgconfig/railhead.pc

clean:
	$(CARGO) clean
	rm -rf c_examples/build
