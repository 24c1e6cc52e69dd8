# Host code: objects that programs of both devices share. It needs no CUDA, and little optimization: its time goes into
# the disk, the network and the compiler.
HOST_BUILD := build/host$(if $(filter asan debug walk,$(VARIANT)),-$(VARIANT))
HOST_FLAGS := -std=c++20 $(WARNINGS) -I. $(MPI_FLAGS)
HOST_FOLDERS := $(patsubst %/,%,$(sort $(dir $(HOST_SOURCES))))
LARGE_FOLDERS := $(foreach folder,$(HOST_FOLDERS),$(if $(word 5,$(wildcard $(folder)/*.cpp)),$(folder)))
HOST_OBJECTS := $(foreach text,$(subst /,_,$(LARGE_FOLDERS)) small_folders,$(HOST_BUILD)/$(text).o)
HOST_LIBRARY := $(HOST_BUILD)/host.a
HOST_LIBRARIES := -lxxhash $(MPI_LIBRARIES)
# Names the flags of the last build. With other ones, as after an MPI was installed, all is built again.
HOST_FLAGS_NOW := $(HOST_BUILD)/flags
$(HOST_FLAGS_NOW): always
	$(call write_text,echo '$(HOST_FLAGS) $(MPI_LIBRARIES)')

# $(1): how an object is optimized
COMPILE_HOST = g++ $(HOST_FLAGS) $(if $(filter debug walk,$(VARIANT)),-O0 -g,$(1)) $(SANITIZE) -MMD -MP -c -o $@ $<
# $(1): a folder of sources; $(2): how its objects are optimized; $(3): the prefix of their names
define compile_host
$(HOST_BUILD)/$(3)%.o: $(1)/%.cpp $(HOST_FLAGS_NOW)
	@mkdir -p $$(@D)
	$$(call COMPILE_HOST,$(2))
endef
$(foreach folder,test test/faults dev,$(eval $(call compile_host,$(folder),-O0)))
$(eval $(call compile_host,dev/ladders,-O1,ladder_))

# The compiler's time goes into the headers of libraries. So sources become one text, in which each header stands once: the
# sources of each folder that has five or more, those of all other folders, and those of a quarter of the tests. A text
# changes when a source comes or goes.
# $(1): the command that prints a text. (The new text lies where no script copies it while it comes and goes.)
define write_text
	@mkdir -p $(@D)
	@new=build/text.$$$$; $(1) > $$new || { rm $$new; exit 1; }; if cmp -s $$new $@; then rm $$new; else mv $$new $@; fi
endef
# $(1): the text; $(2): the command that prints it; $(3): how it is optimized
define compile_text
$(HOST_BUILD)/$(1).cpp: always
	$$(call write_text,$(2))
$(HOST_BUILD)/$(1).o: $(HOST_BUILD)/$(1).cpp $(HOST_FLAGS_NOW)
	$$(call COMPILE_HOST,$(3))
HOST_TEXTS += $(HOST_BUILD)/$(1).cpp
endef
# $(1): the text; $(2): folders
compile_folders = $(call compile_text,$(1),printf '\043include "%s"\n' $(sort $(wildcard $(2:%=%/*.cpp))),-O1)
$(foreach folder,$(LARGE_FOLDERS),$(eval $(call compile_folders,$(subst /,_,$(folder)),$(folder))))
$(eval $(call compile_folders,small_folders,$(filter-out $(LARGE_FOLDERS),$(HOST_FOLDERS))))
# The list of rooms: the folders with a room.cpp
$(eval $(call compile_text,rooms,dev/make/rooms.sh $(wildcard extensions/*/room.cpp runtime/*/room.cpp),-O1))
HOST_OBJECTS += $(HOST_BUILD)/rooms.o
$(HOST_LIBRARY): $(HOST_OBJECTS)
	@mkdir -p $(@D); rm -f $@
	@ar rcs $@ $^

# A quarter of the tests is one program, which has the names of all of them, and runs the cases of the name that it is
# called by (test/run_cases.h).
HOST_TESTS := $(sort $(filter %.cpp,$(TEST_SOURCES)))
QUARTERS := 1 2 3 4
# $(1): tests; $(2): one of the quarters
tests_of = $(shell printf '%s\n' $(1) | awk 'NR % 4 + 1 == $(2)')
define compile_tests
$(call compile_text,tests_$(1),test/one_text.sh $(2),-O0)
$(BUILD)/tests_$(1): $(HOST_BUILD)/main.o
$(addprefix $(BUILD)/,$(basename $(notdir $(2)))): $(BUILD)/tests_$(1)
	@ln -f $$< $$@
endef
$(foreach quarter,$(QUARTERS),$(eval $(call compile_tests,$(quarter),$(call tests_of,$(HOST_TESTS),$(quarter)))))
$(BUILD)/test%: $(HOST_BUILD)/test%.o $(HOST_LIBRARY)
	@mkdir -p $(@D)
	g++ $(SANITIZE) -o $@ $^ $(HOST_LIBRARIES)
always:
# for dev/schedule.py, and dev/forecasts.cpp
$(addprefix $(HOST_BUILD)/,schedule forecasts): %: %.o $(HOST_LIBRARY)
	g++ $(SANITIZE) -o $@ $^ $(HOST_LIBRARIES)
$(BUILD)/test_pipeline: | $(HOST_BUILD)/schedule
# dev/lessons: programs of their own, which need MPI
LESSONS := $(patsubst dev/lessons/%.cpp,$(HOST_BUILD)/%,$(wildcard dev/lessons/*.cpp))
$(eval $(call compile_host,dev/lessons,-O1))
$(LESSONS): %: %.o
	g++ $(SANITIZE) -o $@ $^ $(HOST_LIBRARIES)
$(BUILD)/test_lessons: | $(if $(MPI_FLAGS),$(LESSONS))

# Does another compiler take the host's code? make syntax CXX=g++-11 (whichever) looks, and makes no objects.
SYNTAX := $(CXX) $(HOST_FLAGS) -fsyntax-only -x c++
SYNTAX_SOURCES := $(HOST_TEXTS) $(wildcard dev/ladders/*.cpp dev/*.cpp $(if $(MPI_FLAGS),dev/lessons/*.cpp) test/faults/*.cpp)
syntax: $(SYNTAX_SOURCES:%=syntax-of-%)
	@echo "syntax: $(CXX) takes the host's code"
$(SYNTAX_SOURCES:%=syntax-of-%): syntax-of-%: %
	@$(SYNTAX) $*
.PHONY: always syntax $(SYNTAX_SOURCES:%=syntax-of-%)
