// How a room, a folder of extensions/ or runtime/, adds options to the program. The core names no room: a folder with a file
// room.cpp has a Room in it, called NAME_room, and dev/make/rooms.sh writes the list of them. A room's part in training is in
// its hook.cuh (gpt/step_hook.h), its part in the model in its model.cuh (gpt/model_room.cuh), its part in the parameter store
// in its store.cuh (gpt/store_room.cuh), and its work before training, or instead of it, in its command.cuh (gpt/command.h).
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "gpt/options_of_rooms.h"

namespace CLI {
class App;
}
struct Options;
struct StepOptions;
struct Launch;
struct Positions;
class DataCache;
class KeptChoices;
class Ranks;
class Refusals;
struct Staging;
struct TensorRow;

struct Room {
  const char* name;  // as --help takes it
  // Adds the room's options to the command line, with where their values go.
  void (*add_options)(CLI::App& app, Options& options);
  // Null: no other option depends on them. Sets the options that depend on them, before those are checked.
  void (*decide)(Options& options, const Refusals& words) = nullptr;
  // Null: there is nothing to check. Refuses options that contradict each other (gpt/option_rules.h).
  void (*refuse_together)(const Refusals& refuse, const Options& options) = nullptr;
  // Null: nothing follows from them. Sets the values that follow from the options, which have been checked.
  void (*complete)(Options& options) = nullptr;
  // Null: they need none. Hands the values down that the room's parts of a model and of a parameter store read (StoreOptions::rooms).
  void (*hand_down)(RoomOptions& model, const StepOptions& options) = nullptr;
  // Null: any number of ranks will do. Refuses options that these ranks (options.mesh) cannot have.
  void (*refuse_on_ranks)(const Options& options) = nullptr;
  // Null: there can be none. The problem with the samples of a step, and with the model's shape, on these ranks; empty: none
  // (batch_problem and shape_problem of gpt/step_options.h ask all rooms)
  std::string (*batch_problem)(const StepOptions& options) = nullptr;
  std::string (*shape_problem)(const StepOptions& options) = nullptr;
  // Null: a rank has all of a sample. The positions of a sample of seq_len tokens whose rows rank `rank` of the `ranks` that split
  // samples has.
  Positions (*positions)(const RoomOptions& model, int seq_len, int ranks, int rank) = nullptr;
  // Null: the model's own are. The tensors of a block that are trained in the place of the model's own; none: those are
  std::vector<TensorRow> (*trained_tensors)(const StepOptions& options) = nullptr;
  // Null: the options change no arithmetic. Adds to trainer.json the values that must be the same when a run is resumed.
  void (*add_arithmetic)(nlohmann::json& arithmetic, const Options& options) = nullptr;
  // Null: the folder itself. The folder of the model that belongs to a checkpoint, or to --init. Sets options that it decides.
  std::filesystem::path (*folder_of_model)(Options& options, const std::filesystem::path& folder, bool is_checkpoint) = nullptr;
  // Null: any will do. Fails if a model to start from, which is no checkpoint's, does not go with the data. of_text: bytes are tokens
  void (*check_model)(const std::filesystem::path& folder, const Options& options, bool of_text) = nullptr;
  // Null: there are none. Adds files of text to a checkpoint: name, content.
  void (*add_files)(std::map<std::string, std::string>& files, const Options& options) = nullptr;
  // Null: they are read in their place. Keeps what is read of data files (gpt/data.h); it may return null, too.
  std::unique_ptr<DataCache> (*data_cache)(const Options& options) = nullptr;
  // Null: each start makes them anew. Keeps choices of algorithms from start to start.
  std::unique_ptr<KeptChoices> (*kept_choices)(const Options& options) = nullptr;
  // Null: it does not. Connects the ranks of a job in another way than Ranks does (gpt/ranks.h). Returns when all have come.
  std::unique_ptr<Ranks> (*connect)(const Launch& launch) = nullptr;
  // Null: each stage has all layers, and there is one. Deals layers and work out to stages.
  const Staging* staging = nullptr;
  bool is_private = false;  // its options may hold secrets: they are compared and written down nowhere
};

// The rooms of this build, by their names.
const std::vector<const Room*>& rooms();
