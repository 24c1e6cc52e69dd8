// Statistics of tensors: sum, absolute maximum and checksum.
#include "runtime/checks/kernels/statistics.cuh"
#include "test/kernel_test.cuh"

namespace {

// `offset`: elements from the start of an allocation, which has one more at the end.
template <class T>
TensorStatistics statistics_of(const std::vector<T>& values, size_t offset = 0) {
  std::vector<T> shifted(offset + values.size() + 1, from_float<T>(1e6f));
  std::copy(values.begin(), values.end(), shifted.begin() + long(offset));
  Buffer<T> device(shifted);
  Buffer<TensorStatistics> workspace(partial_sums<T>(values.size())), result(1);
  tensor_statistics(result.data(), device.data() + offset, values.size(), workspace.data(), test_stream());
  return result.get()[0];
}

template <class T>
uint64_t checksum_of(const std::vector<T>& values) {
  return statistics_of(values).checksum;
}

// Bits times a hash of the position, as the header comment says, one element after another.
template <class T>
uint64_t expected_checksum(const std::vector<T>& values) {
  uint64_t sum = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t> bits;
    std::memcpy(&bits, &values[i], sizeof bits);
    uint64_t z = (i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    sum += uint64_t(bits) * ((z ^ (z >> 27)) | 1);
  }
  return sum;
}

template <class T>
void check_against_float64(const std::vector<T>& values, size_t offset = 0) {
  const TensorStatistics actual = statistics_of(values, offset);
  double sum = 0, magnitudes = 0, largest = 0;
  for (double x : as_double(values)) {
    sum += x;
    magnitudes += std::abs(x);
    largest = std::max(largest, std::abs(x));
  }
  // Double rounds by 1.1e-16, and no element goes through more than some hundred additions; most roundings cancel.
  CHECK_WITHIN("sum", actual.sum - sum, 1e-14 * magnitudes);
  CHECK(actual.absolute_maximum == float(largest));
  CHECK(actual.checksum == expected_checksum(values));
}

}  // namespace

TEST_CASE_TEMPLATE("sum, absolute maximum and checksum at any size", T, float, __nv_bfloat16, __half) {
  // Edges of packs, of threads, of blocks; the last size is over what all blocks read when each reads its least.
  const size_t pack = pack_width<T>, row = pack * sum_block, unit = row * sum_packs;
  for (size_t count : {size_t(0), size_t(1), pack - 1, pack, pack + 1, row - 1, row + 1, unit - 1, unit, unit + 1,
                       3 * unit + 51, large_shapes ? unit * most_sum_blocks + 2 * unit + 7 : 5 * unit}) {
    CAPTURE(count);
    check_against_float64(random_values<T>(count, 3.0, 0.1));
  }
}

TEST_CASE_TEMPLATE("a tensor may start anywhere", T, float, __nv_bfloat16, __half) {
  const auto values = random_values<T>(5000);
  for (size_t offset : {1, 3, pack_width<T> - 1, pack_width<T>}) {
    CAPTURE(offset);
    check_against_float64(values, offset);
  }
}

TEST_CASE_TEMPLATE("the largest may be anywhere", T, float, __nv_bfloat16, __half) {
  for (size_t place : {0, 1, 255, 4095, 4096, 9998}) {
    CAPTURE(place);
    auto values = random_values<T>(9999);
    values[place] = from_float<T>(-100);
    CHECK(statistics_of(values).absolute_maximum == 100);
  }
}

TEST_CASE("the checksum is the same on every device") {  // this one was computed by hand
  CHECK(checksum_of<float>({1, -2, 0.5f}) == 0x638a5e9b37800000u);
}

TEST_CASE_TEMPLATE("every change shows in the checksum", T, float, __nv_bfloat16, __half) {
  const auto values = random_values<T>(3000);
  const uint64_t checksum = checksum_of(values);
  auto changed = values;
  changed[1234] = from_float<T>(-to_float(values[1234]));
  CHECK(checksum_of(changed) != checksum);
  changed[1234] = values[1234];
  CHECK(checksum_of(changed) == checksum);
  changed[2999] = from_float<T>(to_float(values[2999]) * 1.01f);
  CHECK(checksum_of(changed) != checksum);
  changed = values;
  std::swap(changed[17], changed[18]);
  CHECK(checksum_of(changed) != checksum);
  changed = values;
  std::rotate(changed.begin(), changed.begin() + 1, changed.end());
  CHECK(checksum_of(changed) != checksum);
  // A second difference of zero, which a hash linear in the position would not see.
  changed.assign(64, from_float<T>(1));
  const uint64_t ones = checksum_of(changed);
  const float next = std::is_same_v<T, float> ? 1 + 0x1p-23f : 1 + 0x1p-7f, after = 2 * next - 1;
  changed[5] = changed[7] = from_float<T>(next);
  const uint64_t two = checksum_of(changed);
  changed[5] = changed[7] = from_float<T>(1);
  changed[6] = from_float<T>(after);
  CHECK(two != ones);
  CHECK(checksum_of(changed) != two);
  std::vector<T> zero(1, from_float<T>(0)), negative = zero;  // (g++ is told that the sign of zeros does not matter)
  reinterpret_cast<unsigned char*>(negative.data())[sizeof(T) - 1] = 0x80;
  CHECK(checksum_of(zero) != checksum_of(negative));
}

TEST_CASE_TEMPLATE("what is not finite shows", T, float, __nv_bfloat16, __half) {
  auto values = random_values<T>(5001);
  values[700] = from_float<T>(-INFINITY);
  CHECK(statistics_of(values).absolute_maximum == INFINITY);
  CHECK(statistics_of(values).sum == -INFINITY);
  values[4000] = from_float<T>(NAN);
  CHECK(std::isnan(statistics_of(values).absolute_maximum));
  CHECK(std::isnan(statistics_of(values).sum));
}

TEST_CASE("the same tensor gives the same bits") {
  const auto values = random_values<float>(large_shapes ? 1234567 : 12345);
  const TensorStatistics first = statistics_of(values);
  for (int i = 0; i < 3; ++i) {
    const TensorStatistics again = statistics_of(values);
    CHECK(std::memcmp(&again.sum, &first.sum, sizeof first.sum) == 0);
    CHECK(again.checksum == first.checksum);
    CHECK(again.absolute_maximum == first.absolute_maximum);
  }
}
