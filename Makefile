# gpt.cu
#
#   make            ./train_gpt for the device this machine has: its GPU (if nvcc is there too), else its CPU
#   make cpu | gpu  the same, forced
#   make train      train a small GPT on the C++ headers of this machine, and let it write some
#   make test       build and run all tests
#   make deps       install the packages that are missing (root or sudo)
#
# More: bench, ladders, shakespeare, test-faults, test-cluster, test-sanitize, test-race, fuzz, clean. `make DEVICE=cpu TARGET` picks the device for any of them.
.DEFAULT_GOAL := all
.SUFFIXES:
ifeq ($(MAKELEVEL),0)
  MAKEFLAGS += --jobs=$(shell nproc)
endif
.SECONDARY:

NVCC := $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
GPU_ARCH := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u | tr -d .)
DEVICE ?= $(if $(and $(NVCC),$(GPU_ARCH)),gpu,cpu)
VARIANT :=
BUILD := build/$(DEVICE)$(VARIANT:%=-%)
WARNINGS := -Wall -Wextra -Wno-restrict  # which g++ 12 gets wrong for "text" + string (GCC bug 105651)
# MPI, where it is installed, brings several ranks together (parallel/launch.h)
MPI_FLAGS := $(shell mpicc --showme:compile 2>/dev/null)
MPI_FLAGS := $(if $(MPI_FLAGS),-DGPT_MPI -DOMPI_SKIP_MPICXX $(MPI_FLAGS))
MPI_LIBRARIES := $(if $(MPI_FLAGS),$(shell mpicc --showme:link))

# ---- the CPU device: g++ compiles the filtered sources (build/.../src) against cpu/
HOST_ARCH := $(shell uname -m)
FLAGS_fast := -O3 -fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros
ifneq ($(filter x86_64 aarch64,$(HOST_ARCH)),)
  FLAGS_fast += -march=native
endif
ifeq ($(HOST_ARCH),x86_64)
  FLAGS_fast += -mprefer-vector-width=512
endif
FLAGS_ := $(FLAGS_fast)
FLAGS_asan := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
FLAGS_tsan := -O1 -g -DCPU_THREAD_SANITIZER -DCPU_LIKE_A_GPU  # races are looked for in what a GPU's threads do
FLAGS_debug := -O0 -g
# counts memory accesses (cpu/access_counts.h), those that nvcc would leave: functions are inlined, structs stay whole, no
# code is duplicated, and (-O1) nothing is inferred about addresses from types
FLAGS_counts := -O1 -g -finline-functions -finline-small-functions -fno-tree-sra -fno-thread-jumps -fdebug-prefix-map=$(CURDIR)=. \
  -DCPU_COUNT_ACCESSES -DCPU_LIKE_A_GPU
CPU_FLAGS := -std=c++20 $(FLAGS_$(VARIANT)) -fopenmp -fstack-clash-protection $(WARNINGS) -Wno-unknown-pragmas -I$(BUILD)/src -I. -Icpu -Ikernels/without_cudnn $(MPI_FLAGS)
CPU_LIBRARIES := $(if $(filter tsan,$(VARIANT)),-fsanitize=thread) -ldnnl -lboost_context -lxxhash $(MPI_LIBRARIES)
KERNEL_FLAGS := $(if $(filter tsan counts,$(VARIANT)),-fsanitize=thread)  # only kernels and their callers are watched

# ---- the GPU
CUDA_HOME := $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
comma := ,
known_archs = $(shell $(NVCC) --list-gpu-arch 2>/dev/null)
ARCHS ?= $(if $(GPU_ARCH),$(patsubst 100,100a,$(patsubst 90,90a,$(GPU_ARCH))),80 90a $(if $(findstring compute_100,$(known_archs)),100a))
# cuBLAS and NCCL: of the toolkit, of the system, or of NVIDIA's wheels that `make deps` fetches
CUBLAS := $(firstword $(wildcard $(CUDA_HOME)/include/cublasLt.h build/cuda/nvidia/cu*/include/cublasLt.h))
CUBLAS_HOME := $(abspath $(patsubst %/include/cublasLt.h,%,$(CUBLAS)))
CUBLAS_LIBRARY := $(firstword $(wildcard $(CUBLAS_HOME)/lib64/libcublasLt.so $(CUBLAS_HOME)/lib/libcublasLt.so*))
NCCL := $(firstword $(wildcard $(CUDA_HOME)/include/nccl.h /usr/include/nccl.h build/nccl/nvidia/nccl/include/nccl.h))
NCCL_HOME := $(abspath $(patsubst %/include/nccl.h,%,$(NCCL)))
NCCL_LIBRARY := $(firstword $(wildcard $(NCCL_HOME)/lib64/libnccl.so $(NCCL_HOME)/lib/$(HOST_ARCH)-linux-gnu/libnccl.so $(NCCL_HOME)/lib/libnccl.so*))
# cuDNN does attention, where it is found with its C++ frontend 1.x: in the toolkit, in the system, or in NVIDIA's wheels
# that `make build/cudnn` fetches. USE_CUDNN=0 builds without it, USE_CUDNN=1 does not build without it.
CUDNN_HOMES := $(CUDA_HOME) /usr $(wildcard build/cudnn build/cudnn/nvidia/*)
cudnn_part = $(abspath $(firstword $(wildcard $(foreach home,$(CUDNN_HOMES),$(foreach folder,include lib64 lib/$(HOST_ARCH)-linux-gnu lib,$(home)/$(folder)/$(1))))))
MISSING_FOR_CUDNN := $(strip $(foreach part,cudnn.h cudnn_frontend/graph_interface.h nvrtc.h libcudnn.so* libnvrtc.so*,$(if $(call cudnn_part,$(part)),,$(subst *,,$(part)))))
CUDNN_LIBRARIES := $(call cudnn_part,libcudnn.so*) $(call cudnn_part,libnvrtc.so*)
CUDNN_INCLUDES := $(patsubst %,-isystem %/include,$(filter build/%,$(CUDNN_HOMES)))  # compilers know the others
USE_CUDNN ?= $(if $(MISSING_FOR_CUDNN),0,1)
ATTENTION := $(if $(filter 0,$(USE_CUDNN)),without_cudnn,cudnn)
CUDNN_VERSION = $(shell sed -n 's/^.define CUDNN_\(MAJOR\|MINOR\|PATCHLEVEL\) //p' $(call cudnn_part,cudnn_version.h) | paste -sd.)
BY_CUDNN = $(if $(filter cudnn,$(ATTENTION)),attention by cuDNN $(CUDNN_VERSION),without cuDNN)
GPU_FLAGS = -std=c++20 -O3 $(foreach arch,$(ARCHS),-gencode arch=compute_$(arch)$(comma)code=sm_$(arch)) -Xcompiler -Wall$(comma)-Wextra$(comma)-Wno-restrict$(comma)-fopenmp \
  -I. -Ikernels/cublaslt -Ikernels/$(ATTENTION) -I$(CUBLAS_HOME)/include -I$(NCCL_HOME)/include $(filter -D% -I%,$(MPI_FLAGS))
GPU_LIBRARIES = $(foreach library,$(CUBLAS_LIBRARY) $(NCCL_LIBRARY) $(if $(filter cudnn,$(ATTENTION)),$(CUDNN_LIBRARIES)),-Xlinker $(library) -Xlinker -rpath=$(dir $(library))) \
  $(filter -L% -l%,$(MPI_LIBRARIES)) -lxxhash -lgomp

# ---- what is built
SOURCES := $(wildcard *.cuh kernels/*.cuh parallel/*.cuh dev/ladders/*.cuh dev/ladders/ranks/*.cuh)
TESTS := $(patsubst test/%.cu,%,$(wildcard test/test_*.cu)) $(patsubst test/%.cpp,%,$(wildcard test/test_*.cpp))
CPU_TESTS := $(patsubst test/cpu/%.cu,%,$(wildcard test/cpu/test_*.cu)) $(patsubst test/cpu/%.cpp,%,$(wildcard test/cpu/test_*.cpp))
RANK_TESTS := $(patsubst test/ranks/%.cu,%,$(wildcard test/ranks/test_*.cu))
LADDERS := $(patsubst dev/ladders/%.cu,ladder_%,$(wildcard dev/ladders/*.cu))
RANK_LADDERS := $(patsubst dev/ladders/ranks/%.cu,ladder_%,$(wildcard dev/ladders/ranks/*.cu))
BUILT_TESTS := $(addprefix $(BUILD)/,$(TESTS) $(RANK_TESTS) $(LADDERS) $(RANK_LADDERS) $(if $(filter cpu,$(DEVICE)),$(CPU_TESTS)))

# Packages come first and in a make of their own: what they install is looked for when a Makefile is read.
all: $(DEVICE)
cpu gpu:
	@$(MAKE) --no-print-directory DEVICE=$@ build/packages-$@
	@$(MAKE) --no-print-directory DEVICE=$@ program
cpu-tests gpu-tests: %-tests:
	@$(MAKE) --no-print-directory DEVICE=$* build/packages-$*
	@$(MAKE) --no-print-directory DEVICE=$* program tests
tests: $(BUILT_TESTS)
program: $(BUILD)/train_gpt
	@cp -f $(BUILD)/train_gpt train_gpt
	@echo "train_gpt: built for the $(DEVICE)$(if $(filter gpu,$(DEVICE)), ($(ARCHS:%=sm_%))$(comma) $(BY_CUDNN))"

ifeq ($(DEVICE),cpu)
FILTER := $(BUILD)/filter
MIRRORED := $(SOURCES:%=$(BUILD)/src/%)
DEVICE_OBJECTS := $(patsubst %,$(BUILD)/%.o,device block workers cuda_runtime nccl $(if $(filter counts,$(VARIANT)),access_counts))

$(FILTER): cpu/filter.cpp
	@mkdir -p $(@D)
	g++ -std=c++20 -O1 $(WARNINGS) -o $@ $<
$(BUILD)/src/%: % $(FILTER)
	@mkdir -p $(@D)
	@$(FILTER) $< $@
$(BUILD)/%.o: cpu/%.cpp
	@mkdir -p $(@D)
	g++ $(CPU_FLAGS) -MMD -MP -c -o $@ $<
# $(1): the folder of the sources; $(2): what programs of theirs are called before their name
define compile
$(BUILD)/$(2)%.o: $(BUILD)/src/$(1)%.cu | $(MIRRORED)
	g++ $$(CPU_FLAGS) $$(KERNEL_FLAGS) -MMD -MP -c -o $$@ -x c++ $$<
$(BUILD)/$(2)%.o: $(1)%.cpp
	@mkdir -p $$(@D)
	g++ $$(CPU_FLAGS) -MMD -MP -c -o $$@ $$<
endef
$(BUILD)/%: $(BUILD)/%.o $(DEVICE_OBJECTS)
	g++ $(CPU_FLAGS) -o $@ $^ $(CPU_LIBRARIES)
device-objects: $(DEVICE_OBJECTS) $(MIRRORED)
ifeq ($(VARIANT),)
# What counts accesses to memory is of a build of its own. (Ladders of ranks are timed.)
COUNTS := $(MAKE) --no-print-directory DEVICE=cpu VARIANT=counts
counting-device:
	+@$(COUNTS) device-objects
$(LADDERS:%=$(BUILD)/%) $(BUILD)/test_access_counts: $(BUILD)/%: counting-device
	+@$(COUNTS) $(BUILD)-counts/$*
	@mkdir -p $(@D); ln -f $(BUILD)-counts/$* $@
endif
else
ATTENTION_OBJECTS := $(patsubst kernels/$(ATTENTION)/%.cpp,$(BUILD)/$(ATTENTION)_%.o,$(wildcard kernels/$(ATTENTION)/*.cpp))
ATTENTION_CHOICE := $(BUILD)/attention

# Names the body of this build. Another one than last time: all is built again.
$(ATTENTION_CHOICE): always
	@if [ $(ATTENTION) = cudnn ] && [ -n "$(MISSING_FOR_CUDNN)" ]; then \
	  echo "USE_CUDNN=1: $(MISSING_FOR_CUDNN) not found: install cuDNN with its C++ frontend, or fetch both with make build/cudnn" >&2; exit 1; fi
	@mkdir -p $(@D); echo $(ATTENTION) | cmp -s - $@ || echo $(ATTENTION) > $@
always:
$(BUILD)/cudnn_%.o: kernels/cudnn/%.cpp $(ATTENTION_CHOICE)
	$(NVCC) $(GPU_FLAGS) $(CUDNN_INCLUDES) -MMD -MP -MF $@.d -c -o $@ $<
define compile
$(BUILD)/$(2)%: $(1)%.cu $(ATTENTION_CHOICE) $(ATTENTION_OBJECTS)
	@mkdir -p $$(@D)
	$(NVCC) $$(GPU_FLAGS) -MMD -MP -MF $$@.d -o $$@ $$< $(ATTENTION_OBJECTS) $$(GPU_LIBRARIES)
$(BUILD)/$(2)%: $(1)%.cpp
	@mkdir -p $$(@D)
	$(NVCC) $$(GPU_FLAGS) -MMD -MP -MF $$@.d -o $$@ $$< $$(GPU_LIBRARIES)
endef
endif
$(eval $(call compile,))
$(foreach folder,test/ test/cpu/ test/ranks/ test/faults/ dev/,$(eval $(call compile,$(folder))))
$(foreach folder,dev/ladders/ dev/ladders/ranks/,$(eval $(call compile,$(folder),ladder_)))
-include $(wildcard $(BUILD)/*.d)

# ---- the CPU device under sanitizers
KERNEL_TESTS := $(filter $(SOURCES:kernels/%.cuh=test_%),$(TESTS))
test-sanitize:
	@$(MAKE) --no-print-directory DEVICE=cpu VARIANT=asan run NAMES="$(TESTS) $(filter-out test_access_counts,$(CPU_TESTS)) $(LADDERS)"
# (the + hands make's job slots on to the script)
test-race:
	@$(MAKE) --no-print-directory DEVICE=cpu VARIANT=tsan run NAMES="$(KERNEL_TESTS) test_device test_failures $(LADDERS) $(RANK_LADDERS)"
	+@test/remove_barriers.sh
	+@test/remove_events.sh
run: $(NAMES:%=$(BUILD)/%) $(if $(filter test_program,$(NAMES)),$(BUILD)/train_gpt)
	@export OMP_NUM_THREADS=1 GPT_BUILD=$(BUILD) GPT_FILTER=$(FILTER) UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=history_size=4; \
	for test in $(NAMES:%=$(BUILD)/%); do echo "$$test"; $$test || exit 1; done

# ---- packages: a header of each, and the Debian or Ubuntu package that has it
PACKAGES := CLI/CLI.hpp=libcli11-dev nlohmann/json.hpp=nlohmann-json3-dev doctest/doctest.h=doctest-dev \
  xxhash.h=libxxhash-dev $(if $(filter cpu,$(DEVICE)),oneapi/dnnl/dnnl.hpp=libdnnl-dev \
  boost/context/detail/fcontext.hpp=libboost-context-dev)
PROGRAMS := mpicc=libopenmpi-dev mpirun=openmpi-bin  # an MPI of another kind does too
MISSING = $(strip $(if $(shell command -v g++),,g++) $(foreach package,$(PACKAGES),\
  $(if $(shell printf '\043include <$(firstword $(subst =, ,$(package)))>\n' | g++ -E -x c++ - >/dev/null 2>&1 && echo found),,\
  $(lastword $(subst =, ,$(package)))))\
  $(foreach program,$(PROGRAMS),$(if $(shell command -v $(firstword $(subst =, ,$(program)))),,$(lastword $(subst =, ,$(program))))))
AS_ROOT = $(if $(filter 0,$(shell id -u)),,$(if $(shell command -v sudo),sudo,none))
CUDA_VERSION = $(shell $(NVCC) --version | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p')
CUDA_MAJOR = $(basename $(CUDA_VERSION))

deps:
	@missing="$(MISSING)"; \
	if [ -z "$$missing" ]; then echo "deps: nothing missing"; \
	elif [ "$(AS_ROOT)" = none ] || ! command -v apt-get >/dev/null; then \
	  echo "deps: missing $$missing: install these packages (apt-get install as root), then run make again" >&2; exit 1; \
	else $(AS_ROOT) apt-get update -q && $(AS_ROOT) apt-get install -y -q --no-install-recommends $$missing; fi
	@if [ -n "$(NVCC)" ] && [ -n "$(strip $(WHEELS))" ]; then $(MAKE) --no-print-directory $(WHEELS); fi
# for a CUDA toolkit that came without them
WHEELS = $(if $(CUBLAS),,build/cuda) $(if $(NCCL),,build/nccl)
build/cuda: WHEEL = nvidia-cublas$(if $(filter 12,$(CUDA_MAJOR)),-cu12)==$(CUDA_VERSION).*
build/nccl: WHEEL = nvidia-nccl-cu$(CUDA_MAJOR)
# optional: 0.9 GB
build/cudnn: WHEEL = nvidia-cudnn-cu$(CUDA_MAJOR) nvidia-cudnn-frontend \
  $(if $(wildcard $(CUDA_HOME)/include/nvrtc.h),,nvidia-cuda-nvrtc$(if $(filter 12,$(CUDA_MAJOR)),-cu12)==$(CUDA_VERSION).*)
build/cuda build/nccl build/cudnn:
	python3 -m pip install -q --no-deps --target $@ $(WHEEL:%='%')
build/packages-cpu:
	@if [ -n "$(MISSING)" ]; then $(MAKE) --no-print-directory deps; fi
	@mkdir -p build && touch $@
build/packages-gpu:
	@if [ -n "$(MISSING)" ]; then $(MAKE) --no-print-directory deps; fi
	@if [ -z "$(NVCC)" ]; then echo "gpu: nvcc is not found: install the CUDA toolkit, or build with make cpu" >&2; exit 1; fi
	@if [ -n "$(strip $(WHEELS))" ]; then $(MAKE) --no-print-directory $(WHEELS); fi
	@mkdir -p build; echo "GPU build: nvcc $(CUDA_MAJOR), cuBLASLt, NCCL$(if $(MPI_FLAGS),$(comma) MPI,; without MPI ranks start by torchrun's variables or srun); $(BY_CUDNN)$(if $(MISSING_FOR_CUDNN), (not found: $(MISSING_FOR_CUDNN); make build/cudnn fetches it))"; touch $@

# ---- what people run
# The C++ standard library's headers: real text on every machine with a compiler. Files whose name starts with s or t
# are for validation.
HEADERS = $(shell dirname $$(printf '\043include <vector>\n' | g++ -x c++ -M - | tr ' ' '\n' | grep '/vector$$' | head -1))
TRAIN_OPTIONS ?=
train: all
	./train_gpt --train '$(HEADERS)/[!st]*' '$(HEADERS)/bits/[!st]*' '$(HEADERS)/ext/*' --val '$(HEADERS)/[st]*' '$(HEADERS)/bits/[st]*' \
	  --layers 4 --heads 4 --channels 256 --seq-len 256 --micro-batch 4 --steps 1150 --lr 2e-3 --min-lr 1e-4 --warmup 50 \
	  --beta2 0.99 --shuffle --val-every 230 --val-batches 40 --log-every 23 --sample-every 1150 --sample-len 500 \
	  --checkpoint-every 230 \
	  --out runs/cpp --resume $(TRAIN_OPTIONS)

test: $(DEVICE)-tests
	@test/run.sh $(BUILD)

# several hosts, Slurm, killed ranks: needs root
test-cluster: all
	@test/cluster/run.sh

# killed ranks and failing disks; FAULTS_COUNT=100 FAULTS_SEED=7: more kills, and others
test-faults: all
	@$(MAKE) --no-print-directory DEVICE=$(DEVICE) $(BUILD)/test_faults $(BUILD)/failing_io.so
	@GPT_BUILD=$(BUILD) $(BUILD)/test_faults
$(BUILD)/failing_io.so: test/faults/failing_io.c
	gcc -O1 $(filter -W%,$(WARNINGS)) -fPIC -shared -o $@ $< -ldl

# the readers of files under libFuzzer, where clang is installed
SECONDS ?= 5
fuzz:
	@test/fuzz/run.sh $(SECONDS)

# what the device can do, then gpt2 and (on a GPU) gpt2-xl beside it; BENCH_OPTIONS: of dev/bench.py
bench: all
	@$(MAKE) --no-print-directory DEVICE=$(DEVICE) $(BUILD)/ceilings
	@python3 dev/bench.py --build $(BUILD) $(BENCH_OPTIONS)

# kernels from naive to fast: dev/ladders/README.md
ladders: build/packages-$(DEVICE)
	@$(MAKE) --no-print-directory DEVICE=$(DEVICE) $(patsubst %,$(BUILD)/%,$(LADDERS) $(RANK_LADDERS))

SHAKESPEARE := https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
SHAKESPEARE_SHA256 := 86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
shakespeare: data/tinyshakespeare.txt
data/tinyshakespeare.txt:
	curl -fsSL -o $@.partial $(SHAKESPEARE)
	echo "$(SHAKESPEARE_SHA256)  $@.partial" | sha256sum -c --quiet && mv $@.partial $@

clean:
	rm -rf build train_gpt
.PHONY: always device-objects counting-device ladders test-faults test-cluster all cpu gpu cpu-tests gpu-tests tests program deps train test bench shakespeare test-sanitize test-race fuzz run clean
