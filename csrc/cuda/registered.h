// Which devices have asked for which host memory: CUDA registers it once, for all of them. Knows no
// CUDA header, so that tests without a GPU run the same code.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>

#include "linear_params.h"

namespace qlinear::cuda {

class Registered {
 public:
  // `call(is_new)` checks the device and, if the memory is new, has it registered; it returns a
  // ql_status. A device that asks twice is no other device: CUDA says what is wrong with that.
  template <typename Call>
  int add(void* memory, int64_t bytes, int device, Call call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = areas_.find(memory);
    const bool by_another = found != areas_.end() && found->second.bytes == bytes &&
                            found->second.devices.count(device) == 0;
    const int status = call(!by_another);
    if (status != QL_OK) return status;
    if (!by_another) areas_[memory] = {bytes, {}};
    areas_[memory].devices.insert(device);
    return QL_OK;
  }

  // `call()` has the memory unregistered: when the last device lets go of it, or where nobody is
  // known to have it.
  template <typename Call>
  int remove(void* memory, int device, Call call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = areas_.find(memory);
    if (found != areas_.end()) {
      if (found->second.devices.erase(device) == 0) return QL_BAD_DEVICE;
      if (!found->second.devices.empty()) return QL_OK;
    }
    const int status = call();
    // What is still registered must be known, or it could never be registered again.
    if (status == QL_OK && found != areas_.end()) {
      areas_.erase(found);
    } else if (found != areas_.end()) {
      found->second.devices.insert(device);
    }
    return status;
  }

 private:
  struct Area {
    int64_t bytes;
    std::set<int> devices;
  };

  std::mutex mutex_;
  std::map<void*, Area> areas_;
};

}  // namespace qlinear::cuda
