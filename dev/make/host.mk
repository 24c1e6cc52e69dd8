# Host code: objects that programs of both devices share. It needs no CUDA, and little optimization: what takes time there
# is the disk, the network and the compiler.
HOST_BUILD := build/host$(if $(filter asan debug,$(VARIANT)),-$(VARIANT))
HOST_FLAGS := -std=c++20 $(WARNINGS) -I. $(MPI_FLAGS)
HOST_FOLDERS := $(patsubst %/,%,$(sort $(dir $(HOST_SOURCES))))
HOST_OBJECTS := $(patsubst %.cpp,$(HOST_BUILD)/%.o,$(notdir $(HOST_SOURCES)))
HOST_LIBRARY := $(HOST_BUILD)/host.a
HOST_LIBRARIES := -lxxhash $(MPI_LIBRARIES)

# $(1): a folder of sources; $(2): how its objects are optimized; $(3): what they are called before their name
define compile_host
$(HOST_BUILD)/$(3)%.o: $(1)/%.cpp
	@mkdir -p $$(@D)
	g++ $$(HOST_FLAGS) $(if $(filter debug,$(VARIANT)),-O0 -g,$(2)) $$(SANITIZE) -MMD -MP -c -o $$@ $$<
endef
$(foreach folder,$(HOST_FOLDERS),$(eval $(call compile_host,$(folder),-O1)))
$(foreach folder,test test/faults dev,$(eval $(call compile_host,$(folder),-O0)))
$(eval $(call compile_host,dev/ladders,-O1,ladder_))
$(HOST_LIBRARY): $(HOST_OBJECTS)
	@mkdir -p $(@D); rm -f $@
	@ar rcs $@ $^
$(BUILD)/test_%: $(HOST_BUILD)/test_%.o $(HOST_LIBRARY)
	@mkdir -p $(@D)
	g++ $(SANITIZE) -o $@ $^ $(HOST_LIBRARIES)
# what dev/schedule.py asks, and dev/forecasts.cpp
$(addprefix $(HOST_BUILD)/,schedule forecasts): %: %.o $(HOST_LIBRARY)
	g++ $(SANITIZE) -o $@ $^ $(HOST_LIBRARIES)
$(BUILD)/test_pipeline: | $(HOST_BUILD)/schedule
# dev/lessons: programs of their own, which need MPI
LESSONS := $(patsubst dev/lessons/%.cpp,$(HOST_BUILD)/%,$(wildcard dev/lessons/*.cpp))
$(eval $(call compile_host,dev/lessons,-O3))
$(LESSONS): %: %.o
	g++ $(SANITIZE) -o $@ $^ $(HOST_LIBRARIES)
$(BUILD)/test_lessons: | $(if $(MPI_FLAGS),$(LESSONS))

# Does another compiler take the host's code? make syntax CXX=g++-11 (whichever) looks, and makes no objects. Of a folder
# that makes no programs the sources are one text, for which the libraries' headers are read once; where that fails, as it
# does for names that clash, the sources by themselves decide.
SYNTAX := $(CXX) $(HOST_FLAGS) -fsyntax-only -x c++
SYNTAX_FOLDERS := $(HOST_FOLDERS) dev/ladders
SYNTAX_PROGRAMS := $(wildcard dev/*.cpp $(if $(MPI_FLAGS),dev/lessons/*.cpp) test/*.cpp test/faults/*.cpp)
syntax: $(SYNTAX_FOLDERS:%=syntax-of-%) $(SYNTAX_PROGRAMS:%=syntax-of-%)
	@echo "syntax: $(CXX) takes the host's code"
$(SYNTAX_FOLDERS:%=syntax-of-%): syntax-of-%:
	@printf '\043include "%s"\n' $(wildcard $*/*.cpp) | $(SYNTAX) - 2>/dev/null || \
	  for source in $(wildcard $*/*.cpp); do $(SYNTAX) $$source || exit 1; done
$(SYNTAX_PROGRAMS:%=syntax-of-%): syntax-of-%:
	@$(SYNTAX) $*
.PHONY: syntax $(SYNTAX_FOLDERS:%=syntax-of-%) $(SYNTAX_PROGRAMS:%=syntax-of-%)
