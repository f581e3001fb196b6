// Preloaded into a process without a GPU: autograd records CUDA tensors and runs their backward, on a
// device that does nothing. The tensors themselves are fake. Torch may be a CPU or a CUDA build.

#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace at {
namespace accelerator {
// Preloaded, this replaces torch's function, which finds no accelerator.
std::optional<c10::DeviceType> getAccelerator(bool) {
  return kCUDA;
}
} // namespace accelerator

struct NoDevice : CUDAHooksInterface {
  explicit NoDevice(CUDAHooksArgs) {}
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
};
// A CUDA build registers its own hooks too.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, NoDevice)
} // namespace at

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>)
