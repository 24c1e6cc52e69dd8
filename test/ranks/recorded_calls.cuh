// The collectives of this rank that the flight recorder still has, oldest first.
#pragma once

#include "runtime/control/flight_recorder.h"
#include "test/ranks/ranks.cuh"

inline std::vector<FlightRecorder::Entry> recorded_calls() { return dynamic_cast<FlightRecorder&>(ranks().all.calls()).entries(); }
