# The GPU: nvcc compiles each source to an object for each of ARCHS, and links.
known_archs = $(shell $(NVCC) --list-gpu-arch 2>/dev/null)
arch_of = $(patsubst 120,120a,$(patsubst 100,100a,$(patsubst 90,90a,$(subst .,,$(1)))))
ARCHS ?= $(if $(CAPABILITIES),$(call arch_of,$(CAPABILITIES)),80 90a $(if $(findstring compute_100,$(known_archs)),100a))
GPU_FLAGS = -std=c++20 -O3 $(foreach arch,$(ARCHS),-gencode arch=compute_$(arch)$(comma)code=sm_$(arch)) -Xcompiler -Wall$(comma)-Wextra$(comma)-Wno-restrict$(comma)-fopenmp \
  -I. -Ikernels/cublaslt -Ikernels/$(ATTENTION) -I$(CUBLAS_HOME)/include -I$(NCCL_HOME)/include $(filter -D% -I%,$(MPI_FLAGS))
CUDNN_LIBRARIES := $(call cudnn_part,libcudnn.so*) $(call cudnn_part,libnvrtc.so*)
CUDNN_INCLUDES := $(patsubst %,-isystem %/include,$(filter build/%,$(CUDNN_HOMES)))  # compilers know the others
GPU_LIBRARIES = $(foreach library,$(CUBLAS_LIBRARY) $(NCCL_LIBRARY) $(if $(filter cudnn,$(ATTENTION)),$(CUDNN_LIBRARIES)),-Xlinker $(library) -Xlinker -rpath=$(dir $(library))) \
  $(filter -L% -l%,$(MPI_LIBRARIES)) -lxxhash -lgomp
ATTENTION_OBJECTS := $(patsubst kernels/$(ATTENTION)/%.cpp,$(BUILD)/$(ATTENTION)_%.o,$(wildcard kernels/$(ATTENTION)/*.cpp))
ATTENTION_CHOICE := $(BUILD)/attention

# Names the body of this build. Another one than last time: all is built again.
$(ATTENTION_CHOICE): always
	@if [ $(ATTENTION) = cudnn ] && [ -n "$(MISSING_FOR_CUDNN)" ]; then \
	  echo "USE_CUDNN=1: $(MISSING_FOR_CUDNN) not found: install cuDNN with its C++ frontend, or fetch both with make build/cudnn" >&2; exit 1; fi
	@mkdir -p $(@D); echo $(ATTENTION) | cmp -s - $@ || echo $(ATTENTION) > $@
always:
$(BUILD)/cudnn_%.o: kernels/cudnn/%.cpp $(ATTENTION_CHOICE)
	$(NVCC) $(GPU_FLAGS) $(CUDNN_INCLUDES) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<
$(MODELS): $(BUILD)/gpt_%.o: gpt.cu $(ATTENTION_CHOICE)
	$(NVCC) $(GPU_FLAGS) -DSTORAGE_TYPE=$* -MMD -MP -MF $(@:.o=.d) -c -o $@ $<
# $(1): the folder of the sources; $(2): what programs of theirs are called before their name
define compile
$(BUILD)/$(2)%.o: $(1)%.cu $(ATTENTION_CHOICE)
	@mkdir -p $$(@D)
	$(NVCC) $$(GPU_FLAGS) -MMD -MP -MF $$(@:.o=.d) -c -o $$@ $$<
endef
$(eval $(call compile,))
$(foreach folder,kernels/ parallel/ test/ test/ranks/ dev/,$(eval $(call compile,$(folder))))
$(foreach folder,dev/ladders/ dev/ladders/ranks/,$(eval $(call compile,$(folder),ladder_)))
$(BUILD)/%: $(BUILD)/%.o $(ATTENTION_OBJECTS)
	$(NVCC) $(GPU_FLAGS) -o $@ $(filter-out %.a,$^) $(filter %.a,$^) $(GPU_LIBRARIES)
