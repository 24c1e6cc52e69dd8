# The GPU: nvcc compiles each source to an object for each of ARCHS, and links.
# ARCHS: the architectures of this machine's cards, from 80 (Ampere) on, that this nvcc knows; on a machine without a
# card, the three kinds that people rent. On a card that is newer than nvcc, the driver compiles compute_80's PTX.
KNOWN_ARCHS := $(patsubst compute_%,%,$(if $(NVCC),$(shell $(NVCC) --list-gpu-arch 2>/dev/null)))
SEEN_ARCHS := $(filter-out 5% 6% 7%,$(subst .,,$(CAPABILITIES)))
ARCHS ?= $(or $(patsubst 100,100a,$(patsubst 90,90a,$(or $(filter $(KNOWN_ARCHS),$(SEEN_ARCHS)),$(SEEN_ARCHS:%=80)))),80 90a $(filter 100a,$(KNOWN_ARCHS:=a)))
PTX := $(if $(filter 80,$(ARCHS))$(filter-out $(KNOWN_ARCHS),$(SEEN_ARCHS)),-gencode arch=compute_80$(comma)code=compute_80)
GPU_OPTIMIZE := -O3
# The kernels of an object are compiled by as many threads as there are cores, where nvcc can do that.
SPLIT_COMPILE := $(if $(NVCC),$(shell $(NVCC) --help 2>/dev/null | grep -q -e --split-compile && echo --split-compile=0))
GPU_FLAGS = -std=c++20 --expt-relaxed-constexpr $(GPU_OPTIMIZE) $(SPLIT_COMPILE) $(foreach arch,$(sort $(ARCHS)),-gencode arch=compute_$(arch)$(comma)code=sm_$(arch)) $(PTX) -Xcompiler -Wall$(comma)-Wextra$(comma)-Wno-restrict$(comma)-fopenmp \
  -I. -Ibuild/host/ $(if $(filter cudnn,$(ATTENTION)),-DGPT_CUDNN) -I$(CUBLAS_HOME)/include -I$(NCCL_HOME)/include $(filter -D% -I%,$(MPI_FLAGS))
# NVRTC, by which cuDNN compiles at run time, opens its builtins by name: they are found if they have been loaded.
CUDNN_LIBRARIES := $(foreach library,libcudnn libnvrtc libnvrtc-builtins,$(call cudnn_part,$(library).so*))
CUDNN_INCLUDES := $(patsubst %,-isystem %/include,$(filter build/%,$(CUDNN_HOMES)))  # compilers know the others
GPU_LIBRARIES = -Xlinker --no-as-needed $(foreach library,$(CUBLAS_LIBRARY) $(NCCL_LIBRARY) $(if $(filter cudnn,$(ATTENTION)),$(CUDNN_LIBRARIES)),-Xlinker $(library) -Xlinker -rpath=$(dir $(library))) \
  $(filter -L% -l%,$(MPI_LIBRARIES)) -lxxhash -lgomp
ATTENTION_OBJECTS := $(patsubst extensions/$(ATTENTION)/kernels/%.cpp,$(BUILD)/$(ATTENTION)_%.o,$(wildcard extensions/$(ATTENTION)/kernels/*.cpp))
ATTENTION_CHOICE := $(BUILD)/attention

# Names the body of this build. Another one than last time: all is built again.
$(ATTENTION_CHOICE): always
	@if [ $(ATTENTION) = cudnn ] && [ -n "$(MISSING_FOR_CUDNN)" ]; then \
	  echo "USE_CUDNN=1: $(MISSING_FOR_CUDNN) not found: install cuDNN with its C++ frontend, or fetch both with make build/cudnn" >&2; exit 1; fi
	@mkdir -p $(@D); echo $(ATTENTION) | cmp -s - $@ || echo $(ATTENTION) > $@
# The same of the cards that it is for, of how it is optimized, and of MPI's flags. (Machine code for reading, of dev/, is made for one kind of card.)
FLAGS_NOW := $(BUILD)/flags
GPU_FLAGS_NOW := $(GPU_OPTIMIZE) $(sort $(ARCHS)) $(PTX) $(MPI_FLAGS) $(MPI_LIBRARIES)
$(FLAGS_NOW): always
	$(call write_text,echo '$(GPU_FLAGS_NOW)')
$(BUILD)/cudnn_%.o: extensions/cudnn/kernels/%.cpp $(ATTENTION_CHOICE) $(FLAGS_NOW)
	$(NVCC) $(GPU_FLAGS) $(CUDNN_INCLUDES) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<
$(MODELS): $(BUILD)/gpt_%.o: gpt/gpt_instances.cu $(ATTENTION_CHOICE) $(FLAGS_NOW) | $(LISTS_OF_ROOMS)
	$(NVCC) $(GPU_FLAGS) -DSTORAGE_TYPE=$* -MMD -MP -MF $(@:.o=.d) -c -o $@ $<
$(BUILD)/rooms.o: $(BUILD)/rooms.cu $(ATTENTION_CHOICE) $(FLAGS_NOW)
	$(NVCC) $(GPU_FLAGS) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<
# $(1): the folder of the sources; $(2): the prefix of their programs' names
define compile
$(BUILD)/$(2)%.o: $(1)%.cu $(ATTENTION_CHOICE) $(if $(filter dev/,$(1)),,$(FLAGS_NOW)) | $(LISTS_OF_ROOMS)
	@mkdir -p $$(@D)
	$(NVCC) $$(GPU_FLAGS) -MMD -MP -MF $$(@:.o=.d) -c -o $$@ $$<
endef
$(eval $(call compile,))
# Machine code alone, for one of ARCHS. It is made to be read: as for training, whatever else is compiled in a hurry.
$(BUILD)/%.cubin: override GPU_OPTIMIZE := -O3
$(BUILD)/%.cubin: dev/%.cu $(ATTENTION_CHOICE)
	@mkdir -p $(@D)
	$(NVCC) $(GPU_FLAGS) -MMD -MP -MF $(@:.cubin=.d) -cubin -o $@ $<
$(BUILD)/train_gpt.o $(BUILD)/rooms.o $(MODELS): GPU_OPTIMIZE := -O1  # of host code, which launches kernels; these are always optimized
$(foreach folder,$(sort $(dir $(DEVICE_SOURCES) $(filter %.cu,$(TEST_SOURCES)) $(RANK_SOURCES))) dev/,$(eval $(call compile,$(folder))))
$(foreach folder,dev/ladders/ dev/ladders/ranks/,$(eval $(call compile,$(folder),ladder_)))
$(BUILD)/%: $(BUILD)/%.o $(ATTENTION_OBJECTS)
	$(NVCC) $(GPU_FLAGS) -o $@ $(filter-out %.a,$^) $(filter %.a,$^) $(GPU_LIBRARIES)
