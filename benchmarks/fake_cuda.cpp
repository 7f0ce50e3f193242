// A CUDA device without memory or kernels, for a PyTorch that was built with or without CUDA.
//
// Tensors under FakeTensorMode have shapes, types and a device, but no content. PyTorch's autograd
// still asks the device for streams and events. This library answers: there is one device, its
// streams are always idle, and its events have always happened. It must be loaded before torch.
// Its parts have a higher priority than those of a PyTorch with CUDA, which would need a driver.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace {

const c10::Device DEVICE{c10::DeviceType::CUDA, 0};
const c10::Stream STREAM{c10::Stream::DEFAULT, DEVICE};

// The registry finds the class by this name.
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
};

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  c10::Stream getStream(c10::Device) const noexcept override { return STREAM; }
  c10::Stream getDefaultStream(c10::Device) const override { return STREAM; }
  c10::Stream getNewStream(c10::Device, int) const override { return STREAM; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return STREAM; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

// DistributedDataParallel measures its steps with this.
struct Timer : c10d::Timer {
  explicit Timer(c10::Device) {}
  void record(Event) override {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)

using c10d::RegistererTimerRegistry;
using c10d::TimerRegistry;
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(TimerRegistry, DEVICE.type(), c10::REGISTRY_PREFERRED, Timer)

}  // namespace

// Python calls this after it has imported torch. A guard has no priority. The guard that is
// registered last is used, and a PyTorch with CUDA registers its own during the import.
extern "C" void use_fake_cuda() {
  static Guard guard;
  c10::impl::registerDeviceGuard(DEVICE.type(), &guard);
}
