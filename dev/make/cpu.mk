# The CPU device: g++ compiles the filtered sources (build/.../src) against cpu/. VARIANT chooses another way to compile:
# asan and tsan with sanitizers, counts to count accesses to memory, debug for gdb, walk to write which functions are entered.
FILTER := $(BUILD)/filter
MIRRORED := $(SOURCES:%=$(BUILD)/src/%) $(LISTS_OF_ROOMS)
DEVICE_OBJECTS := $(patsubst %,$(BUILD)/%.o,device block asynchronous workers cuda_runtime memory streams switches log nccl \
  $(if $(filter counts,$(VARIANT)),access_counts))

FLAGS_fast := -O3 -fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros
# MARCH: the processors that may run the program: native, those like this machine's; portable, all servers since 2015
MARCH ?= native
PORTABLE_x86_64 := x86-64-v3
PORTABLE_aarch64 := armv8-a
ifneq ($(filter x86_64 aarch64,$(HOST_ARCH)),)
  FLAGS_fast += -march=$(if $(filter portable,$(MARCH)),$(PORTABLE_$(HOST_ARCH)),$(MARCH))
endif
ifeq ($(HOST_ARCH),x86_64)
  FLAGS_fast += -mprefer-vector-width=512
endif
FLAGS_ = $(FLAGS_fast)
FLAGS_asan := -O1 -g -fno-omit-frame-pointer
FLAGS_tsan := -O1 -g -DCPU_THREAD_SANITIZER -DCPU_LIKE_A_GPU  # finds races between a GPU's threads
FLAGS_debug := -O0 -g
FLAGS_walk := $(FLAGS_debug)
# counts the memory accesses that nvcc would leave (dev/ladders/cpu/access_counts.h): functions are inlined, structs
# stay whole, no code is duplicated, and (-O1) nothing is inferred about addresses from types
FLAGS_counts := -O1 -g1 -finline-functions -finline-small-functions -fno-tree-sra -fno-thread-jumps -fdebug-prefix-map=$(CURDIR)=. \
  -DCPU_COUNT_ACCESSES -DCPU_LIKE_A_GPU
SANITIZE := $(if $(filter asan,$(VARIANT)),-fsanitize=address$(comma)undefined -fno-sanitize-recover=undefined) \
  $(if $(filter walk,$(VARIANT)),-finstrument-functions -finstrument-functions-exclude-file-list=cpu/$(comma)/usr/)
CPU_FLAGS = -std=c++20 $(FIRST_INCLUDES) $(FLAGS_$(VARIANT)) $(SANITIZE) -fopenmp -fstack-clash-protection $(WARNINGS) -Wno-unknown-pragmas \
  -I$(BUILD)/src -I. -Icpu -Ibuild/host/ $(MPI_FLAGS)
CPU_LIBRARIES := $(if $(filter tsan,$(VARIANT)),-fsanitize=thread) -ldnnl -lboost_context $(HOST_LIBRARIES)
KERNEL_FLAGS := $(if $(filter tsan counts,$(VARIANT)),-fsanitize=thread)  # only kernels and their callers are watched

# Names the flags of the last build, and the kind of processor that -march=native means. With other ones all is built again.
FLAGS_NOW := $(BUILD)/flags
NATIVE := $(if $(findstring native,$(FLAGS_fast)),$(shell g++ -march=native -Q --help=target 2>/dev/null | awk '$$1 == "-march=" { print $$2; exit }'))
CPU_FLAGS_NOW := $(CPU_FLAGS) $(KERNEL_FLAGS) $(NATIVE)
$(FLAGS_NOW): always
	$(call write_text,echo '$(CPU_FLAGS_NOW)')
# Copies of sources that have moved are found by no #include
STALE := $(filter-out $(SOURCES:%=$(BUILD)/src/%),$(shell find $(BUILD)/src -name '*.cuh' 2>/dev/null))
$(if $(STALE),$(shell rm -f $(STALE)))

$(FILTER): cpu/filter.cpp
	@mkdir -p $(@D)
	g++ -std=c++20 -O1 $(WARNINGS) -o $@ $<
$(BUILD)/src/%: % $(FILTER)
	@mkdir -p $(@D)
	@$(FILTER) $< $@
$(BUILD)/%.o: cpu/%.cpp $(FLAGS_NOW)
	@mkdir -p $(@D)
	g++ $(CPU_FLAGS) -MMD -MP -c -o $@ $<
$(MODELS): $(BUILD)/gpt_%.o: $(BUILD)/src/gpt/gpt_instances.cu $(FLAGS_NOW) | $(MIRRORED)
	g++ $(CPU_FLAGS) $(KERNEL_FLAGS) -DSTORAGE_TYPE=$* -MMD -MP -c -o $@ -x c++ $<
$(BUILD)/rooms.o: $(BUILD)/rooms.cu $(FLAGS_NOW) | $(MIRRORED)
	g++ $(CPU_FLAGS) -MMD -MP -c -o $@ -x c++ $<
# $(1): the folder of the sources; $(2): the prefix of their programs' names
define compile
$(BUILD)/$(2)%.o: $(BUILD)/src/$(1)%.cu $(FLAGS_NOW) | $(MIRRORED)
	g++ $$(CPU_FLAGS) $$(KERNEL_FLAGS) -MMD -MP -c -o $$@ -x c++ $$<
endef
$(eval $(call compile,))
$(foreach folder,$(sort $(dir $(DEVICE_SOURCES))) test/cpu/ test/cpu/cublaslt/ test/cpu/cudnn/ dev/,$(eval $(call compile,$(folder))))
$(foreach folder,dev/ladders/ dev/ladders/ranks/,$(eval $(call compile,$(folder),ladder_)))
# $(1): a test. (Not by its folder: build/.../src may still have the old copy of a test that has moved.)
define compile_test
$(BUILD)/$(basename $(notdir $(1))).o: $(BUILD)/src/$(1) $(FLAGS_NOW) | $(MIRRORED)
	g++ $$(CPU_FLAGS) $$(KERNEL_FLAGS) -MMD -MP -c -o $$@ -x c++ $$<
endef
$(foreach test,$(filter %.cu,$(TEST_SOURCES)) $(RANK_SOURCES),$(eval $(call compile_test,$(test))))
$(BUILD)/%.o: dev/ladders/cpu/%.cpp $(FLAGS_NOW)
	@mkdir -p $(@D)
	g++ $(CPU_FLAGS) -MMD -MP -c -o $@ $<
$(BUILD)/%.o: test/cpu/%.cpp $(FLAGS_NOW)
	@mkdir -p $(@D)
	g++ $(CPU_FLAGS) -MMD -MP -c -o $@ $<
# Tests of kernels are compiled quickly and linked behind the model: of a kernel that both have, the linker takes the one that
# trains, which is optimized.
ifeq ($(VARIANT),)
KERNELS_TESTED := $(basename $(notdir $(filter %.cu,$(TEST_SOURCES))))
$(KERNELS_TESTED:%=$(BUILD)/%.o): FLAGS_fast := -O1
$(KERNELS_TESTED:%=$(BUILD)/%): $(MODELS) $(BUILD)/device.a $(HOST_LIBRARY)
endif
# These have no kernels, or none that is timed or compared; only compiling takes time. (That the kernels that train give
# the same bits with any number of threads is compared by test_program, too.)
$(patsubst %,$(BUILD)/%.o,train_gpt rooms tensor_log rank_check sync_check test_cublaslt test_cudnn test_gpu_lanes test_ring test_search \
  $(RANK_TESTS) $(QUARTERS:%=rank_tests_%)): FLAGS_fast := -O1
$(patsubst %,$(BUILD)/%.o,test_model test_counts test_determinism test_trace test_failures test_hopper_failures test_device test_strict): FLAGS_fast := -O0
# (g++ 12 is wrong about a text in the list of a model's options, at -O1)
$(BUILD)/train_gpt.o $(BUILD)/rooms.o $(BUILD)/mesh_check.o: WARNINGS += -Wno-maybe-uninitialized
# The host's code of the GPU's products and of cuDNN's attention, on the CPU device, with libraries made for tests
$(BUILD)/test_cublaslt.o $(BUILD)/test_sm_margin.o: FIRST_INCLUDES := -DGPT_CUBLASLT -Itest/cpu/cublaslt
$(BUILD)/test_cudnn.o: FIRST_INCLUDES := -DGPT_CUDNN -Itest/cpu/cudnn
$(BUILD)/test_cublaslt.o: $(BUILD)/src/test/test_matmul.cu $(BUILD)/src/test/fp8/test_fp8.cu
# Kernels with a GPU's lanes, where the CPU device has others
$(BUILD)/test_gpu_lanes.o: FIRST_INCLUDES := -DCPU_LIKE_A_GPU
$(BUILD)/test_gpu_lanes.o: $(BUILD)/src/test/test_layernorm.cu $(BUILD)/src/test/test_cross_entropy.cu
$(BUILD)/train_gpt: $(if $(filter walk,$(VARIANT)),$(HOST_BUILD)/walk.o)
# (the model comes first)
$(BUILD)/%: $(BUILD)/%.o $(DEVICE_OBJECTS)
	g++ $(CPU_FLAGS) -o $@ $(filter $(MODELS),$^) $(filter-out $(MODELS) %.a,$^) $(filter %.a,$^) $(CPU_LIBRARIES)

# Tests of several ranks are four texts and programs, as the host's tests are (host.mk); but for one with a library of its own.
RANK_TEXTS := $(sort $(filter-out %/test_sm_margin.cu,$(RANK_SOURCES)))
define compile_rank_tests
$(BUILD)/rank_tests_$(1).cpp: $(2:%=$(BUILD)/src/%) always
	$$(call write_text,test/one_text.sh $(2))
$(BUILD)/rank_tests_$(1).o: $(BUILD)/rank_tests_$(1).cpp $(FLAGS_NOW) | $(MIRRORED)
	g++ $$(CPU_FLAGS) $$(KERNEL_FLAGS) -MMD -MP -c -o $$@ $$<
$(BUILD)/rank_tests_$(1): $(MODELS) $(BUILD)/device.a $(HOST_LIBRARY)
$(addprefix $(BUILD)/,$(basename $(notdir $(2)))): $(BUILD)/rank_tests_$(1)
	@ln -f $$< $$@
endef
$(foreach quarter,$(QUARTERS),$(eval $(call compile_rank_tests,$(quarter),$(call tests_of,$(RANK_TEXTS),$(quarter)))))

device-objects: $(DEVICE_OBJECTS) $(MIRRORED)
ifeq ($(VARIANT),)
# Programs that count accesses to memory have a build of their own. (Ladders of ranks are timed.)
COUNTS := $(MAKE) --no-print-directory DEVICE=cpu VARIANT=counts
counting-device:
	+@$(COUNTS) device-objects
$(LADDERS:%=$(BUILD)/%) $(BUILD)/test_access_counts $(BUILD)/test_access_engines $(BUILD)/launches: $(BUILD)/%: counting-device
	+@$(COUNTS) $(BUILD)-counts/$*
	@mkdir -p $(@D); ln -f $(BUILD)-counts/$* $@
endif
