// Which elements of which tensor each rank has, answers for, writes and reads (gpt/tensors.h, shards.h, blocks.h).
#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "gpt/blocks.h"

namespace {

// Layers, heads, channels, vocabulary, positions. Eight ranks have 3 channels each, which is no multiple of 4. Two of
// eight ranks have all of 129 tokens, and the other six have padding only. Half of 257 tokens are one more than 128.
// Only three ranks divide anything in the last shape.
const std::vector<ModelShape> shapes = {{2, 24, 24, 211, 23}, {1, 24, 24, 129, 5}, {1, 8, 16, 257, 8}, {1, 3, 51, 211, 23}};

// Calls work() for every shape and every number of tensor-parallel ranks that it allows, with the ranks' tensor lists.
void for_lists(const std::function<void(const std::vector<TensorList>&)>& work) {
  for (const ModelShape& shape : shapes)
    for (int tp : {1, 2, 3, 4, 6, 8}) {
      if (shape.heads % tp != 0) continue;
      CAPTURE(shape.channels);
      CAPTURE(shape.vocabulary);
      CAPTURE(tp);
      std::vector<TensorList> lists;
      for (int rank = 0; rank < tp; ++rank) lists.emplace_back(shape, tp, rank);
      work(lists);
    }
}

// The same for meshes of tp × data ranks; the shards of tensor-parallel rank t on data rank d are shards[d][t].
using MeshShards = std::vector<std::vector<Shards>>;
void for_meshes(const std::function<void(const MeshShards&)>& work) {
  for_lists([&](const std::vector<TensorList>& lists) {
    for (int data : {1, 2, 7}) {
      CAPTURE(data);
      MeshShards shards(static_cast<size_t>(data));
      for (int rank = 0; rank < data; ++rank)
        for (const TensorList& list : lists) shards[size_t(rank)].emplace_back(list, data, rank);
      work(shards);
    }
  });
}

// Counts, for each element of each whole tensor, how often it is met.
class Elements {
 public:
  explicit Elements(const TensorList& list) {
    for (const TensorDescriptor& tensor : list.tensors()) times_[tensor.name].resize(tensor.count());
  }
  void meet(const CheckpointBlock& block) {
    std::vector<int>& times = times_.at(block.tensor->name);
    for (size_t i = 0; i < block.count; ++i) ++times.at(block.first + i);
  }
  bool all_met(const std::string& name, int times) const {
    return std::ranges::count(times_.at(name), times) == long(times_.at(name).size());
  }
  bool all_met_once() const {
    return std::ranges::all_of(times_, [&](const auto& tensor) { return all_met(tensor.first, 1); });
  }

 private:
  std::map<std::string, std::vector<int>> times_;
};

// The number in the whole tensor of a rank's element, derived from what the tensor means.
size_t whole_element(const TensorList& list, const TensorDescriptor& tensor, size_t local) {
  const size_t C = size_t(list.shape().channels), tp = size_t(list.tp()), rank = size_t(list.tp_rank()), h = C / tp;
  const auto is = [&](const char* name) { return tensor.name.find(name) != std::string::npos; };
  if (is("attn.c_attn")) {  // the columns of this rank's heads, of q, of k and of v
    const size_t row = local / (3 * h), third = local % (3 * h) / h, column = local % h;
    return row * 3 * C + third * C + rank * h + column;
  }
  if (is("mlp.c_fc")) return local / (4 * h) * 4 * C + rank * 4 * h + local % (4 * h);  // columns, as gelu needs them
  if (is("attn.c_proj.weight")) return rank * h * C + local;                           // rows, as its input is split
  if (is("mlp.c_proj.weight")) return rank * 4 * h * C + local;
  if (is("wte")) return rank * size_t(list.vocabulary_rows()) * C + local;
  return local;
}

}  // namespace

TEST_CASE("tensor-parallel ranks: parts tile each split tensor, and every rank has the others whole") {
  for_lists([](const std::vector<TensorList>& lists) {
    Elements elements(lists[0]);
    bool as_meant = true;
    for (const TensorList& list : lists)
      for (const TensorDescriptor& tensor : list.tensors()) {
        for (const CheckpointBlock& run : runs(tensor, 0, tensor.local)) elements.meet(run);
        for (size_t local = 0; local < tensor.local; ++local)
          as_meant &= tensor.part.in_whole(local) == whole_element(list, tensor, local) &&
                      local_before(tensor, tensor.part.in_whole(local)) == local;
        as_meant &= local_before(tensor, tensor.count()) == tensor.local;
      }
    CHECK(as_meant);
    for (const TensorDescriptor& tensor : lists[0].tensors()) {
      CAPTURE(tensor.name);
      CHECK(elements.all_met(tensor.name, tensor.split.axis >= 0 ? 1 : int(lists.size())));
    }
  });
}

TEST_CASE("units have the same sizes on all ranks; split tensors come first, then whole ones, then summed ones") {
  for_lists([](const std::vector<TensorList>& lists) {
    for (const TensorList& list : lists) {
      CHECK(list.parameters() == lists[0].parameters());
      for (size_t i = 0; i < list.units().size(); ++i) {
        const Unit &unit = list.units()[i], &of_first = lists[0].units()[i];
        CHECK(std::vector{unit.count, unit.decayed, unit.split, unit.summed} ==
              std::vector{of_first.count, of_first.decayed, of_first.split, of_first.summed});
      }
      for (const TensorDescriptor& tensor : list.tensors()) {
        CAPTURE(tensor.name);
        const Unit& unit = list.units()[size_t(tensor.unit)];
        const size_t end = tensor.offset + tensor.local;
        CHECK(tensor.offset == lists[0].find(tensor.name).offset);
        CHECK(end <= unit.count);
        CHECK((tensor.decays() ? end <= unit.decayed : tensor.offset >= unit.decayed));
        CHECK((tensor.split.axis >= 0 ? end <= unit.split : tensor.offset >= unit.split));
        CHECK((tensor.split.summed ? tensor.offset >= unit.summed : end <= unit.summed));
      }
    }
  });
}

TEST_CASE("of the embedding a pipeline's last stage has wte alone, and cuts it into the pieces of the first stage") {
  for (int data : {1, 2, 7})
    for (int rank = 0; rank < data; ++rank) {
      const TensorList first(shapes[0], 1, 0, {{0, 1}}), last(shapes[0], 1, 0, {{shapes[0].layers - 1, 1}});
      const Shards of_first(first, data, rank), of_last(last, data, rank);
      CHECK(of_first.piece(0) == of_last.piece(0));
      std::vector<Slice> mine = of_first.slices(0, of_first.begin(0), of_first.piece(0));
      const std::vector<Slice> its = of_last.slices(0, of_last.begin(0), of_last.piece(0));
      std::erase_if(mine, [](const Slice& slice) { return slice.tensor->name == "wpe.weight"; });
      REQUIRE(its.size() == mine.size());
      for (size_t i = 0; i < its.size(); ++i) {
        CHECK(its[i].tensor->name == "wte.weight");
        CHECK(its[i].first == mine[i].first);
        CHECK(its[i].count == mine[i].count);
        CHECK(its[i].in_unit == mine[i].in_unit);
      }
      CHECK(first.has(first.find("wpe.weight")));
      CHECK(!last.has(last.find("wpe.weight")));
      CHECK(last.find("wpe.weight").local == 0);
    }
}

TEST_CASE("all ranks together answer for each element of the model once") {
  for_meshes([](const MeshShards& mesh) {
    Elements elements(mesh[0][0].list());
    for (const auto& group : mesh)
      for (const Shards& shards : group)
        for (int unit = 0; unit < shards.units(); ++unit) {
          const Range range = shards.owned(unit);
          CHECK(range.begin + range.count <= shards.list().units()[size_t(unit)].count);
          for (const Slice& slice : shards.slices(unit, range.begin, range.count))
            for (const CheckpointBlock& run : runs(*slice.tensor, slice.first, slice.first + slice.count)) elements.meet(run);
        }
    CHECK(elements.all_met_once());
  });
}

TEST_CASE("the written blocks of all ranks hold each element of the model once") {
  for (size_t most : {size_t(10), size_t(300), SIZE_MAX})
    for_meshes([&](const MeshShards& mesh) {
      CAPTURE(most);
      Elements elements(mesh[0][0].list());
      for (const auto& group : mesh)
        for (const Shards& shards : group)
          for (const CheckpointBlock& block : written_blocks(shards, most)) {
            elements.meet(block);
            if (block.gathered) continue;
            const Slice all = {block.tensor, 0, block.tensor->local, block.tensor->offset};
            CHECK(common(block, all).count == block.count);  // the rank has all of it
          }
      CHECK(elements.all_met_once());
    });
}

TEST_CASE("one rank, and tensors whose parts are no short runs: a block for each slice, and nothing is gathered") {
  for_meshes([&](const MeshShards& mesh) {
    for (const auto& group : mesh)
      for (const Shards& shards : group) {
        const std::vector<CheckpointBlock> blocks = written_blocks(shards, 300);
        if (group.size() == 1) CHECK(blocks.size() == shards.owned_slices().size());
        for (const Slice& slice : shards.owned_slices()) {
          const std::string& name = slice.tensor->name;
          if (group.size() > 1 && (name.find("c_attn") != name.npos || name.ends_with("c_fc.weight"))) continue;
          const auto of_slice = [&](const CheckpointBlock& block) { return block.tensor == slice.tensor; };
          CAPTURE(name);
          REQUIRE(std::ranges::count_if(blocks, of_slice) == 1);
          const CheckpointBlock& block = *std::ranges::find_if(blocks, of_slice);
          CHECK(block.first == slice.tensor->part.in_whole(slice.first));
          CHECK(block.count == slice.count);
        }
      }
  });
}

TEST_CASE("tensor-parallel ranks gather in the same rounds, and most of what is short runs") {
  for (size_t most : {size_t(300), SIZE_MAX})
    for_meshes([&](const MeshShards& mesh) {
      CAPTURE(most);
      for (const auto& group : mesh) {
        std::vector<std::vector<CheckpointBlock>> gathered(group.size());  // by tensor-parallel rank
        size_t short_runs = 0;
        for (size_t rank = 0; rank < group.size(); ++rank)
          for (const CheckpointBlock& block : written_blocks(group[rank], most)) {
            if (block.gathered) gathered[rank].push_back(block);
            else short_runs += block.tensor->split.axis == 1;
          }
        if (group.size() == 1) CHECK(gathered[0].empty());
        // Of each matrix that is split by columns, a rank writes some runs alone: the runs that ZeRO has cut, one at
        // either end of its piece, and the runs of the stripes that are left over.
        const size_t matrices = 2 * size_t(group[0].list().shape().layers);
        if (group.size() > 1) CHECK(short_runs <= group.size() * matrices * (2 + group.size() - 1));
        for (size_t rank = 0; rank < group.size(); ++rank) {
          REQUIRE(gathered[rank].size() == gathered[0].size());
          for (size_t i = 0; i < gathered[0].size(); ++i) {  // side by side, and of equal size
            const CheckpointBlock &mine = gathered[rank][i], &first = gathered[0][i];
            CHECK(mine.tensor->name == first.tensor->name);
            CHECK(mine.count == first.count);
            CHECK(mine.first == first.first + rank * first.count);
            CHECK(mine.count <= most);
            CHECK(mine.count * group.size() <= most_gathered(group[rank]));
          }
        }
      }
    });
}

// Values of a tensor: each element's value is its number.
std::vector<float> numbers(const CheckpointBlock& block) {
  std::vector<float> values(block.count);
  std::iota(values.begin(), values.end(), float(block.first));
  return values;
}

TEST_CASE("a rank finds all that it keeps in the blocks that it reads") {
  for (size_t most : {size_t(40), most_at_once})
    for_meshes([&](const MeshShards& mesh) {
      CAPTURE(most);
      const Shards& shards = mesh.back().back();
      for (bool pieces : {false, true}) {  // as in ZeRO stage 3; 0
        std::map<const TensorDescriptor*, Slice> kept;
        for (int unit = 0; unit < shards.units(); ++unit)
          for (const Slice& slice : pieces ? shards.slices(unit, shards.begin(unit), shards.piece(unit))
                                           : shards.slices(unit, 0, shards.whole(unit)))
            kept[slice.tensor] = slice;
        for (const auto& [tensor, slice] : kept) {
          CAPTURE(tensor->name);
          std::vector<float> found;
          for (const CheckpointBlock& block : read_blocks({slice}, most)) {
            const Slice part = common(block, slice);
            CHECK((block.count <= most || part.count == block.count));
            CHECK(part.first == slice.first + found.size());
            CHECK(part.in_unit == tensor->offset + part.first);
            std::ranges::copy(pick(part, block, numbers(block)), std::back_inserter(found));
          }
          REQUIRE(found.size() == slice.count);
          size_t wrong = 0;
          for (size_t i = 0; i < slice.count; ++i) wrong += found[i] != float(tensor->part.in_whole(slice.first + i));
          CHECK(wrong == 0);
        }
      }
    });
}
