#include <emulator/device.hpp>
