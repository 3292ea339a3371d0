"""How products of one device are cut: as was measured, else as the planner says.

And for how many of its multiprocessors. Launches nothing.
"""

from qlinear_service.dtypes import DType
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.cuda_abi import CudaDevice, CudaPlan
from qlinear_service.kernels.cuda_runtime import CudaRuntime
from qlinear_service.kernels.tuned_plans import TunedPlans

__all__ = ["CudaPlans"]


class CudaPlans:
    """The plans of one device.

    Args:
        runtime: of that device.
        tuned: its measured plans.
    """

    def __init__(self, runtime: CudaRuntime, tuned: TunedPlans) -> None:
        self._runtime, self._tuned = runtime, tuned
        self._fewer: CudaDevice | None = None
        """The device as it is to be planned for, where that is not as it is."""

    def leave(self, multiprocessors: int) -> None:
        """Let `leaving` leave so many multiprocessors to other kernels from now on; 0: none.

        Raises:
            ValueError: not one would be left for products; the planner knows no such device.
        """
        if not 0 <= multiprocessors < self._runtime.info.sm_count:
            raise ValueError(
                f"{multiprocessors} multiprocessors cannot be left to other kernels; expected 0 to "
                f"{self._runtime.info.sm_count - 1}, one fewer than the device has"
            )
        self._fewer = None
        if multiprocessors:
            self._fewer = CudaDevice.from_buffer_copy(self._runtime.info)
            self._fewer.sm_count -= multiprocessors

    def leaving(
        self, params: LinearParams, rows: int, x_dtype: DType, output_dtype: DType
    ) -> CudaPlan:
        """Return the plan that leaves multiprocessors alone, if any are to be.

        Args:
            params: of the layer; rows and dtypes are filled in.
            rows: of x.
            x_dtype: of x.
            output_dtype: of y.
        """
        plan = self.whole(params, rows, x_dtype, output_dtype)
        on_each = -(-plan.ctas // self._runtime.info.sm_count)
        if self._fewer is None or plan.ctas <= on_each * self._fewer.sm_count:
            return plan
        found = self._planned(params, self._fewer)
        # Another kernel may not have been tested.
        return found if found.kernel == plan.kernel else plan

    def whole(
        self, params: LinearParams, rows: int, x_dtype: DType, output_dtype: DType
    ) -> CudaPlan:
        """Return the plan for all of the device; takes what `leaving` takes."""
        params.m, params.x_dtype, params.y_dtype = rows, x_dtype, output_dtype
        params.x_row_stride, params.y_row_stride = params.k, params.n
        plans = self._tuned.of(params)
        tuned = None if plans is None else plans.plan(params)
        if tuned is not None:
            return CudaPlan.from_buffer_copy(tuned)
        return self._planned(params, self._runtime.info)

    def _planned(self, params: LinearParams, device: CudaDevice) -> CudaPlan:
        plan, runtime = CudaPlan(), self._runtime
        status = runtime.library.ql_cuda_plan_linear(params, device, runtime.flags, plan)
        operation = f"plan m={params.m} n={params.n} k={params.k} bits={params.bits}"
        runtime.check(status, operation)
        return plan
