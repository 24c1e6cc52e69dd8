# Finds the device, compilers and libraries; names missing packages, and how to install them.
comma := ,
HOST_ARCH := $(shell uname -m)
WARNINGS := -Wall -Wextra -Wno-restrict  # which g++ 12 gets wrong for "text" + string (GCC bug 105651)

NVCC := $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
# Compute capabilities as nvidia-smi prints them, 9.0; where something is wrong it prints its error instead.
CAPABILITIES := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -xE '[0-9]+\.[0-9]+' | sort -u)
DEVICE ?= $(if $(and $(NVCC),$(CAPABILITIES)),gpu,cpu)
WHY_CPU := $(if $(NVCC),nvidia-smi finds no GPU,$(if $(CAPABILITIES),there is a GPU but no nvcc,there is no nvcc))

# MPI, where it is installed, brings several ranks together (gpt/launch.h)
MPI_FLAGS := $(shell mpicc --showme:compile 2>/dev/null)
MPI_FLAGS := $(if $(MPI_FLAGS),-DGPT_MPI -DOMPI_SKIP_MPICXX $(MPI_FLAGS))
MPI_LIBRARIES := $(if $(MPI_FLAGS),$(shell mpicc --showme:link))

# ---- NVIDIA's libraries: of the toolkit, of the system, of $NCCL_HOME, or of the wheels that `make deps` fetches
CUDA_HOME := $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
CUBLAS := $(firstword $(wildcard $(CUDA_HOME)/include/cublasLt.h build/cuda/nvidia/cu*/include/cublasLt.h))
CUBLAS_HOME := $(abspath $(patsubst %/include/cublasLt.h,%,$(CUBLAS)))
CUBLAS_LIBRARY := $(firstword $(wildcard $(CUBLAS_HOME)/lib64/libcublasLt.so $(CUBLAS_HOME)/lib/libcublasLt.so*))
NCCL := $(firstword $(wildcard $(NCCL_HOME:%=%/include/nccl.h) $(CUDA_HOME)/include/nccl.h /usr/include/nccl.h build/nccl/nvidia/nccl/include/nccl.h))
NCCL_HOME := $(abspath $(patsubst %/include/nccl.h,%,$(NCCL)))
NCCL_LIBRARY := $(firstword $(wildcard $(NCCL_HOME)/lib64/libnccl.so $(NCCL_HOME)/lib/$(HOST_ARCH)-linux-gnu/libnccl.so $(NCCL_HOME)/lib/libnccl.so*))
# cuDNN does attention, where it is found with its C++ frontend 1.x: in the toolkit, in the system, or in NVIDIA's wheels
# that `make build/cudnn` fetches. USE_CUDNN=0 builds without it, USE_CUDNN=1 does not build without it.
CUDNN_HOMES := $(CUDA_HOME) /usr $(wildcard build/cudnn build/cudnn/nvidia/*)
cudnn_part = $(abspath $(firstword $(wildcard $(foreach home,$(CUDNN_HOMES),$(foreach folder,include lib64 lib/$(HOST_ARCH)-linux-gnu lib,$(home)/$(folder)/$(1))))))
MISSING_FOR_CUDNN := $(strip $(if $(wildcard extensions/cudnn/kernels),,extensions/cudnn) $(foreach part,cudnn.h cudnn_frontend/graph_interface.h nvrtc.h libcudnn.so* libnvrtc.so*,$(if $(call cudnn_part,$(part)),,$(subst *,,$(part)))))
USE_CUDNN ?= $(if $(MISSING_FOR_CUDNN),0,1)
ATTENTION := $(if $(filter 0,$(USE_CUDNN)),without_cudnn,cudnn)
CUDNN_VERSION = $(shell sed -n 's/^.define CUDNN_\(MAJOR\|MINOR\|PATCHLEVEL\) //p' $(call cudnn_part,cudnn_version.h) | paste -sd.)
BY_CUDNN = $(if $(filter cudnn,$(ATTENTION)),attention by cuDNN $(CUDNN_VERSION),without cuDNN)

# ---- packages: a header or program of each, and the Debian or Ubuntu package that has it. A GPU machine may do without
# MPI: torchrun's variables and srun start ranks there, too.
PACKAGES := CLI/CLI.hpp=libcli11-dev nlohmann/json.hpp=nlohmann-json3-dev doctest/doctest.h=doctest-dev \
  xxhash.h=libxxhash-dev $(if $(filter cpu,$(DEVICE)),oneapi/dnnl/dnnl.hpp=libdnnl-dev \
  boost/context/detail/fcontext.hpp=libboost-context-dev)
PROGRAMS := mpicc=libopenmpi-dev mpirun=openmpi-bin  # an MPI of another kind is left alone, and the program is built without MPI
WITHOUT_MPI := $(if $(MPI_FLAGS),,$(comma) without MPI$(if $(shell command -v mpicc),: mpicc is not Open MPI's))
package = $(lastword $(subst =, ,$(1)))
MISSING_HEADERS = $(foreach named,$(PACKAGES),$(if $(shell printf '\043include <$(firstword $(subst =, ,$(named)))>\n' | \
  g++ -E -x c++ - >/dev/null 2>&1 && echo found),,$(call package,$(named))))
MISSING_PROGRAMS = $(foreach named,$(PROGRAMS),$(if $(shell command -v $(firstword $(subst =, ,$(named)))),,$(call package,$(named))))
MISSING_PIP = $(if $(and $(NVCC),$(strip $(WHEELS))),$(if $(shell python3 -m pip --version 2>/dev/null),,python3-pip))
MISSING = $(strip $(if $(shell command -v g++),,g++) $(MISSING_HEADERS) $(MISSING_PIP) $(MISSING_PROGRAMS))
NEEDED = $(strip $(if $(shell command -v g++),,g++) $(MISSING_HEADERS) $(if $(filter cpu,$(DEVICE)),$(MISSING_PROGRAMS)))
AS_ROOT = $(if $(filter 0,$(shell id -u)),,$(if $(shell command -v sudo),sudo,none))
CUDA_VERSION = $(shell $(NVCC) --version | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p')
CUDA_MAJOR = $(basename $(CUDA_VERSION))
CAN_INSTALL = $(and $(filter-out none,$(or $(AS_ROOT),root)),$(shell command -v apt-get))
# Three of the libraries are headers only, so they do without root, too; these releases were tried.
WITHOUT_ROOT := 'CLI11, nlohmann-json and doctest are headers only. Without root, a folder of your own will do:' \
  '  git clone -q --depth 1 --branch v2.7.2 https://github.com/CLIUtils/CLI11 "$$HOME/headers/CLI11"' \
  '  git clone -q --depth 1 --branch v3.11.3 https://github.com/nlohmann/json "$$HOME/headers/json"' \
  '  git clone -q --depth 1 --branch v2.5.2 https://github.com/doctest/doctest "$$HOME/headers/doctest"' \
  '  export CPATH="$$HOME/headers/CLI11/include:$$HOME/headers/json/include:$$HOME/headers/doctest"'
say_without_root = case "$$missing" in *cli11*|*json*|*doctest*) printf '%s\n' $(WITHOUT_ROOT) >&2 ;; esac
# for a CUDA toolkit that came without them
WHEELS = $(if $(filter gpu,$(DEVICE)),$(if $(CUBLAS),,build/cuda) $(if $(NCCL),,build/nccl))

deps:
	@missing="$(MISSING)"; \
	if [ -z "$$missing" ]; then :; \
	elif [ -z "$(CAN_INSTALL)" ] && [ $(DEVICE) = gpu ] && [ "$$missing" = "$(strip $(MISSING_PROGRAMS))" ]; then \
	  echo "deps: without $$missing: torchrun's variables or srun start several ranks here (dev/cluster/torchrun.sh)" >&2; \
	elif [ -z "$(CAN_INSTALL)" ]; then \
	  echo "deps: missing $$missing: install these packages (apt-get install as root), then run make again" >&2; \
	  $(say_without_root); exit 1; \
	else $(AS_ROOT) apt-get update -q && $(AS_ROOT) apt-get install -y -q --no-install-recommends $$missing; fi
	@if [ -n "$(NVCC)" ] && [ -n "$(strip $(WHEELS))" ]; then $(MAKE) --no-print-directory $(WHEELS); fi
packages-are-there: build/packages-$(DEVICE)
# The mark stands for a look at all packages, which takes a second.
build/packages-cpu build/packages-gpu:
	@if [ $@ = build/packages-gpu ] && [ -z "$(NVCC)" ]; then \
	  echo "gpu: nvcc is not found: install the CUDA toolkit, or build with make cpu" >&2; exit 1; fi
	@missing="$(strip $(NEEDED)$(WHEELS:build/%= NVIDIA's %))"; if [ -n "$$missing" ]; then \
	  echo "make: missing: $$missing: make deps$(DEVICE:%= DEVICE=%) $(if $(CAN_INSTALL),installs what is missing,says more)" >&2; \
	  $(if $(CAN_INSTALL),,$(say_without_root);) exit 1; fi
	@mkdir -p build && touch $@
build/cuda: WHEEL = nvidia-cublas$(if $(filter 12,$(CUDA_MAJOR)),-cu12)==$(CUDA_VERSION).*
build/nccl: WHEEL = nvidia-nccl-cu$(CUDA_MAJOR)
# optional: 0.9 GB
build/cudnn: WHEEL = nvidia-cudnn-cu$(CUDA_MAJOR) nvidia-cudnn-frontend \
  $(if $(wildcard $(CUDA_HOME)/include/nvrtc.h),,nvidia-cuda-nvrtc$(if $(filter 12,$(CUDA_MAJOR)),-cu12)==$(CUDA_VERSION).*)
build/cuobjdump: WHEEL = nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
build/cuda build/nccl build/cudnn build/cuobjdump:
	python3 -m pip install -q --no-deps --target $@ $(WHEEL:%='%')
