# gpt.cu
#
#   make            ./train_gpt for the device this machine has: its GPU (if nvcc is there too), else its CPU
#   make cpu | gpu  the same, forced
#   make train      train a small GPT on the C++ headers of this machine, and let it write some
#   make test       build and run all tests
#   make deps       install the packages that are missing (root or sudo); make train and make test do it by themselves
#
# More: bench, ladders, lessons, machine-code, walk, wgmma-hazards, shakespeare, test-all, test-strict, test-slices, test-faults, test-mistakes,
# test-cluster, test-dashboard, pictures, test-sanitize, test-race, fuzz, syntax, gpu-tests, clean, compile_commands.json.
# `make DEVICE=cpu TARGET` chooses the device for any of them. `make DTYPES=bf16` builds the model for one storage type.
.DEFAULT_GOAL := all
.SUFFIXES:
.SECONDARY:
ifeq ($(MAKELEVEL),0)
  MAKEFLAGS += --jobs=$(shell nproc)
endif

include dev/make/libraries.mk  # DEVICE, and where compilers and libraries are
BUILD := build/$(DEVICE)$(VARIANT:%=-%)

# ---- what is built
DTYPES := fp32 bf16 fp16
MODELS := $(DTYPES:%=$(BUILD)/gpt_%.o)
LISTS_OF_ROOMS := build/host/model_rooms.cuh build/host/store_rooms.cuh
# The house: gpt/ and kernels/ are the core, each folder of extensions/ and runtime/ is a room, whose kernels lie in a folder of its own
KERNELS := $(wildcard kernels/*.cuh kernels/*/*.cuh extensions/*/kernels/*.cuh runtime/*/kernels/*.cuh)
SOURCES := $(KERNELS) $(wildcard gpt/*.cuh extensions/*/*.cuh runtime/*/*.cuh dev/ladders/*.cuh dev/ladders/ranks/*.cuh)
HOST_SOURCES := $(wildcard gpt/*.cpp gpt/base/*.cpp extensions/*/*.cpp runtime/*/*.cpp)
DEVICE_SOURCES := $(wildcard extensions/*/*.cu runtime/*/*.cu)
# Tests of the core lie in test/, those of a room in test/ROOM/, which are built if the room is there; tests of several ranks in a
# folder ranks/ of either
ROOMS := $(notdir $(patsubst %/.,%,$(wildcard extensions/*/. runtime/*/.)))
TEST_SOURCES := $(foreach folder,test $(ROOMS:%=test/%),$(wildcard $(folder)/test_*.cu $(folder)/test_*.cpp))
RANK_SOURCES := $(foreach folder,test $(ROOMS:%=test/%),$(wildcard $(folder)/ranks/test_*.cu))
TESTS := $(basename $(notdir $(TEST_SOURCES)))
CPU_TESTS := $(basename $(notdir $(wildcard test/cpu/test_*.cu test/cpu/test_*.cpp test/cpu/*/test_*.cu)))
# (test_sm_margin plays a library, and the CPU device alone has it)
RANK_TESTS := $(filter-out $(if $(filter gpu,$(DEVICE)),test_sm_margin),$(basename $(notdir $(RANK_SOURCES))))
LADDERS := $(patsubst dev/ladders/%.cu,ladder_%,$(wildcard dev/ladders/*.cu))
RANK_LADDERS := $(patsubst dev/ladders/ranks/%.cu,ladder_%,$(wildcard dev/ladders/ranks/*.cu))
BUILT_TESTS := $(addprefix $(BUILD)/,$(TESTS) $(RANK_TESTS) $(LADDERS) $(RANK_LADDERS) $(if $(filter cpu,$(DEVICE)),$(CPU_TESTS)))

all: $(DEVICE)
	@$(if $(filter cpu,$(DEVICE)),echo "train_gpt: for the CPU$(comma) as $(WHY_CPU); make gpu builds for GPUs all the same")
# What is missing is found when a Makefile is read, so what follows an installation is a make of its own.
cpu gpu:
	@$(MAKE) --no-print-directory DEVICE=$@ packages-are-there
	@$(MAKE) --no-print-directory DEVICE=$@ program
cpu-tests gpu-tests: %-tests:
	@$(MAKE) --no-print-directory DEVICE=$* deps
	@$(MAKE) --no-print-directory DEVICE=$* program tests
tests: $(BUILT_TESTS)
program: $(BUILD)/train_gpt
	@cp -f $(BUILD)/train_gpt train_gpt
	@echo "train_gpt: built for the $(DEVICE)$(if $(filter gpu,$(DEVICE)), ($(ARCHS:%=sm_%))$(comma) $(BY_CUDNN))$(WITHOUT_MPI)"

include dev/make/host.mk
include dev/make/$(DEVICE).mk
# Kernels that the program and its tests share, but not the model
DEVICE_LIBRARY := $(BUILD)/device.a
$(DEVICE_LIBRARY): $(patsubst %.cu,$(BUILD)/%.o,$(notdir $(DEVICE_SOURCES)))
	@rm -f $@
	@ar rcs $@ $^
# The lists of the rooms that take part in training, and of those that do something else instead
$(BUILD)/rooms.cu: always
	$(call write_text,dev/make/rooms.sh $(wildcard $(foreach file,hook command,extensions/*/$(file).cuh runtime/*/$(file).cuh)))
$(BUILD)/train_gpt: $(BUILD)/rooms.o
# The lists of those that take part in a model's computations, and in a parameter store
$(LISTS_OF_ROOMS): build/host/%_rooms.cuh: always
	$(call write_text,dev/make/rooms.sh --$* $(wildcard extensions/*/$*.cuh runtime/*/$*.cuh))
# Programs that hold the model link it, once for each storage type. They and a few others need all parts, most tests of
# kernels none.
WITH_MODEL := train_gpt logits test_model test_zero test_tensor_parallel test_meshes test_fp8_meshes test_offload test_delay test_lora test_lora_meshes test_compression test_powersgd test_islands test_sync_check test_counts test_search
$(WITH_MODEL:%=$(BUILD)/%): $(MODELS)
$(addprefix $(BUILD)/,$(WITH_MODEL) test_trace test_fp8 test_cublaslt test_collectives test_context_parallel test_tp_checkpoint test_second_block test_sm_margin test_strict ladder_all_reduce \
  collectives): $(DEVICE_LIBRARY) $(HOST_LIBRARY)
LADDER_OBJECTS := $(patsubst dev/ladders/%.cpp,$(HOST_BUILD)/ladder_%.o,$(wildcard dev/ladders/*.cpp))
$(addprefix $(BUILD)/,$(LADDERS) $(RANK_LADDERS)): $(LADDER_OBJECTS)
# The tests share one main(); tests of several ranks bring their own.
$(addprefix $(BUILD)/,$(TESTS) $(filter-out %failures test_strict,$(CPU_TESTS)) test_faults): $(HOST_BUILD)/main.o
-include $(wildcard $(BUILD)/*.d $(HOST_BUILD)/*.d)

# ---- what people run
# The C++ standard library's headers: real text on every machine with a compiler. Files whose name starts with s or t
# are for validation. In two minutes a GPU reads them many times, so there CUDA's headers come along.
HEADERS = $(shell dirname $$(printf '\043include <vector>\n' | g++ -x c++ -M - | tr ' ' '\n' | grep '/vector$$' | head -1))
CUDA_HEADERS = $(if $(findstring cuda,$(CUDA_HOME)),$(foreach level,* */* */*/* */*/*/*,$(addprefix ',$(CUDA_HOME)/include/$(level)')))
# Two idle Zen 5 cores took 1,590 steps in two minutes, an H200 4,809 in 37 s.
RECIPE_cpu := --layers 6 --heads 2 --channels 128 --seq-len 128 --micro-batch 8 --val-batches 40 --lr 3e-3 --min-lr 1e-4 --warmup 100
RECIPE_gpu = $(CUDA_HEADERS) --model d8 --dtype bf16 --seq-len 256 --micro-batch 64 --val-batches 10 --lr 1e-3 --min-lr 1e-5 --warmup 100
AS_TRAINED := --seq-len $(if $(filter gpu,$(DEVICE)),256 --dtype bf16,128)
SAMPLES := --prompt 'template<typename' $(AS_TRAINED)
TRAIN_OPTIONS ?=
train:
	@$(MAKE) --no-print-directory deps
	@$(MAKE) --no-print-directory all
	@$(MAKE) --no-print-directory train-now
train-now:  # (a make of its own: a recipe's $(HEADERS) are looked for before its first line, so before g++ is installed)
	./train_gpt --train '$(HEADERS)/[!st]*' '$(HEADERS)/bits/[!st]*' '$(HEADERS)/ext/*' $(RECIPE_$(DEVICE)) \
	  --val '$(HEADERS)/[st]*' '$(HEADERS)/bits/[st]*' --val-every 500 --train-minutes 2 --beta2 0.99 --shuffle --log-every 50 \
	  --checkpoint-every 500 --out runs/cpp --resume --sample-seconds 20 --sample-len 200 $(SAMPLES) $(TRAIN_OPTIONS)
	./train_gpt --generate --resume runs/cpp --sample-len 500 $(SAMPLES)
	@dev/make/next_steps.sh $(AS_TRAINED)

test: $(DEVICE)-tests
	@test/run.sh $(BUILD)
# all of the meshes and stages that take turns in make test
test-all: $(DEVICE)-tests
	@test/run.sh $(BUILD) --all

# the CPU device as strict as a GPU is, in all the ways that cpu/README.md lists
test-strict: cpu-tests
	@GPT_CPU_QUEUE=1000 GPT_CPU_LAZY=1 GPT_CPU_DEVICES=8 GPT_CPU_NCCL=ring GPT_CPU_SUMS=hopper test/run.sh build/cpu

# several hosts, Slurm, killed ranks: needs root
test-cluster: all
	@test/cluster/run.sh

# killed ranks and failing disks; FAULTS_COUNT=100 FAULTS_SEED=7: more kills, and others
test-faults: all
	@$(MAKE) --no-print-directory DEVICE=$(DEVICE) $(BUILD)/test_faults $(BUILD)/failing_io.so
	@GPT_BUILD=$(BUILD) $(BUILD)/test_faults
$(BUILD)/failing_io.so: test/faults/failing_io.c
	@mkdir -p $(@D)
	gcc -O1 $(filter -W%,$(WARNINGS)) -fPIC -shared -o $@ $< -ldl
$(BUILD)/test_storage: | $(BUILD)/failing_io.so
# NVML as tests would have it, and an old one that lacks functions
$(BUILD)/fake_nvml.so $(BUILD)/fake_nvml_old.so: test/fake_nvml.c
	@mkdir -p $(@D)
	gcc -O1 $(filter -W%,$(WARNINGS)) -fPIC -shared $(if $(findstring old,$@),-DFAKE_NVML_OLD) -o $@ $<
$(BUILD)/test_monitor $(BUILD)/test_mesh: | $(BUILD)/fake_nvml.so $(BUILD)/fake_nvml_old.so

# the page of dev/dashboard.py in headless Chromium, which needs plotly, too
test-dashboard:
	@command -v chromium chromium-browser google-chrome >/dev/null || { \
	  echo "$@: chromium is not here: apt-get install chromium" >&2; exit 1; }
	@python3 -c 'import plotly' 2>/dev/null || { echo "$@: plotly is not here: python3 -m pip install plotly" >&2; exit 1; }
	@python3 test/dashboard/test_page.py

# the pictures of all pages, drawn again: dev/pictures/draw.py
pictures:
	@$(MAKE) --no-print-directory DEVICE=cpu packages-are-there build/host/schedule build/cpu/ladder_matmul
	@python3 dev/pictures/draw.py

# mistakes that --check-mesh or a test has to find, each in a build of its own
test-mistakes:
	+@test/mistakes/run.sh

# each room that is whole, deleted: everything else builds, and trains the same bits
rooms:
	+@test/without_rooms.sh

# A part of each suite that `make test` leaves out: CI runs it, so that no suite rots unseen. The suites take turns, half of them after
# each commit; and barriers, events, mistakes, rooms and solutions, the next ones each time, some two minutes of processor time.
test-slices:
	+@turn=$$(test/turn.sh); case $$((turn % 2)) in 0) suites='faults barriers mistakes solutions' ;; *) suites='cluster events rooms sanitize' ;; esac; \
	GPT_COMMITS=$$((turn / 2)) $(MAKE) --no-print-directory $$(printf 'slice-of-%s ' $$suites)
slice-of-faults: all
	@FAULTS_COUNT=2 FAULTS_EVERY=60 $(MAKE) --no-print-directory test-faults
slice-of-cluster: all
	@if [ "$$(id -u)" = 0 ] && unshare --net true 2>/dev/null; then test/cluster/run.sh two_hosts; \
	else echo "test-cluster is left out: it needs root, and network namespaces"; fi
slice-of-barriers:
	+@test/remove_barriers.sh --slice
slice-of-events: all
	+@test/remove_events.sh --slice
slice-of-mistakes: all
	+@test/mistakes/run.sh --slice
slice-of-rooms: all
	+@test/without_rooms.sh --slice
slice-of-solutions: all
	+@docs/solutions/check.sh --slice
slice-of-sanitize:
	@$(MAKE) --no-print-directory DEVICE=cpu VARIANT=asan run NAMES=test_device

# the CPU device under sanitizers (No leaks are looked for where ranks are started, as MPI leaks, nor in test_cublaslt, as
# plans of products are kept until the process ends. Ranks: what lies behind scales and codes is aligned for packs, by UBSan.)
KERNEL_TESTS := $(filter $(patsubst %.cuh,test_%,$(notdir $(KERNELS) $(filter dev/ladders/%,$(SOURCES)))),$(TESTS))
# (test_counts counts allocations of a layout in which arrays lie together, test_access_% is of another build)
test-sanitize:
	@$(MAKE) --no-print-directory DEVICE=cpu VARIANT=asan run NAMES="$(TESTS) $(filter-out test_counts test_access_%,$(CPU_TESTS)) $(LADDERS)"
	@$(MAKE) --no-print-directory DEVICE=cpu VARIANT=asan build/cpu-asan/test_fp8_meshes
	GPT_SEPARATE_ARRAYS=1 ASAN_OPTIONS=detect_leaks=0 GPT_PROGRAM=build/cpu-asan/test_fp8_meshes dev/cluster/mpirun.sh 4
# (the + hands make's job slots on to the scripts)
test-race:
	@$(MAKE) --no-print-directory DEVICE=cpu VARIANT=tsan run NAMES="$(KERNEL_TESTS) test_device test_failures test_hopper_failures $(LADDERS) $(RANK_LADDERS)"
	+@test/remove_barriers.sh
	+@test/remove_events.sh
run: $(NAMES:%=$(BUILD)/%) $(if $(filter test_program test_storage,$(NAMES)),$(BUILD)/train_gpt) $(if $(filter test_mesh,$(NAMES)),$(BUILD)/test_collectives)
	@export OMP_NUM_THREADS=1 GPT_SEPARATE_ARRAYS=1 GPT_BUILD=$(BUILD) GPT_FILTER=$(FILTER) UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=history_size=4; \
	failed=; for test in $(NAMES:%=$(BUILD)/%); do echo "$$test"; \
	  case $$test in *_launch | *_sm_player | *_cublaslt | */ladder_all_reduce) export ASAN_OPTIONS=detect_leaks=0 ;; *) export ASAN_OPTIONS=verify_asan_link_order=0 ;; esac; \
	  $$test || failed="$$failed $$test"; done; \
	[ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

# the readers of files under libFuzzer, where clang is installed
SECONDS ?= 5
fuzz:
	+@test/fuzz/run.sh $(SECONDS)

# what the device can do, then gpt2 and (on a GPU) gpt2-xl beside it; BENCH_OPTIONS: of dev/bench.py
bench: all
	@$(MAKE) --no-print-directory DEVICE=$(DEVICE) $(BUILD)/ceilings
	@python3 dev/bench.py --build $(BUILD) $(BENCH_OPTIONS)

# What the machine code of our own kernels says of their speed: dev/machine_code.md
machine-code:
	@$(MAKE) --no-print-directory DEVICE=gpu ARCHS=90a build/gpu/step_kernels.o
	@$(MAKE) --no-print-directory DEVICE=cpu build/cpu/launches
	@command -v cuobjdump /usr/local/cuda/bin/cuobjdump >/dev/null || $(MAKE) --no-print-directory build/cuobjdump
	@python3 dev/machine_code.py $(OPTIONS)

# Through which files does a reader walk who follows a step, or a checkpoint? dev/walk.py
walk:
	@$(MAKE) --no-print-directory DEVICE=cpu VARIANT=walk DTYPES=fp32 build/cpu-walk/train_gpt
	@for i in $$(seq 2000); do echo "line $$i"; done > build/cpu-walk/text
	@OMP_NUM_THREADS=1 GPT_WALK=build/cpu-walk/log GPT_PROGRAM=build/cpu-walk/train_gpt dev/cluster/mpirun.sh 2 --share-gpu --zero 2 --layers 2 --heads 1 \
	  --channels 16 --seq-len 16 --micro-batch 2 --global-batch 8 --steps 3 --train build/cpu-walk/text --out build/cpu-walk/run --overwrite >build/cpu-walk/said
	@python3 dev/walk.py build/cpu-walk/train_gpt build/cpu-walk/log

# Does an instruction use registers of asynchronous products that are not done? dev/wgmma_hazards.py
wgmma-hazards:
	@$(MAKE) --no-print-directory DEVICE=gpu ARCHS=90a build/gpu/product_kernels.cubin
	@command -v cuobjdump /usr/local/cuda/bin/cuobjdump >/dev/null || $(MAKE) --no-print-directory build/cuobjdump
	@python3 dev/wgmma_hazards.py build/gpu/product_kernels.cubin

# kernels from naive to fast: dev/ladders/README.md
ladders: packages-are-there
	@$(MAKE) --no-print-directory DEVICE=$(DEVICE) $(patsubst %,$(BUILD)/%,$(LADDERS) $(RANK_LADDERS))

# two ways to train together that the trainer does not offer: dev/lessons/README.md
lessons: packages-are-there
	@$(MAKE) --no-print-directory DEVICE=$(DEVICE) $(LESSONS)

SHAKESPEARE := https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
SHAKESPEARE_SHA256 := 86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
shakespeare: data/tinyshakespeare.txt
data/tinyshakespeare.txt:
	curl -fsSL -o $@.partial $(SHAKESPEARE)
	echo "$(SHAKESPEARE_SHA256)  $@.partial" | sha256sum -c --quiet && mv $@.partial $@

# for clangd and its like
compile_commands.json: always
	@$(MAKE) --no-print-directory DEVICE=cpu $(LISTS_OF_ROOMS) $(HOST_TEXTS) $(QUARTERS:%=build/cpu/rank_tests_%.cpp)
	@$(MAKE) -Bn --no-print-directory DEVICE=cpu program tests | python3 dev/compile_commands.py > $@

clean:
	rm -rf build train_gpt compile_commands.json
.PHONY: train-now machine-code walk wgmma-hazards all cpu gpu cpu-tests gpu-tests tests program train test test-all test-strict test-cluster test-faults \
  test-dashboard pictures test-mistakes test-slices slice-of-faults slice-of-cluster slice-of-barriers slice-of-events slice-of-mistakes \
  slice-of-rooms slice-of-solutions rooms slice-of-sanitize test-sanitize test-race run fuzz \
  bench ladders lessons shakespeare clean deps packages-are-there counting-device device-objects
