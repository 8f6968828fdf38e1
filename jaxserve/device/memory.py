"""What fits the device: the page pool sized from its memory, and the table that says how.

It does arithmetic on bytes and knows no arrays.
"""

from dataclasses import dataclass

from jaxserve.device.plan import PAGE_SIZE, pages_for
from jaxserve.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Where the device's bytes go.

    Attributes:
        limit_bytes: what may be used in all (on a CPU the machine's memory); None: unknown.
        int4_bytes: of the weights, those of int4 leaves.
        state_bytes: what the slots keep between steps, mostly penalties and biases by token.
        temp_bytes: most that one program needs while it runs.
        kv_bytes: what the page pool may take.
    """

    limit_bytes: int | None
    weight_bytes: int
    int4_bytes: int
    state_bytes: int
    temp_bytes: int
    kv_bytes: int
    bytes_per_page: int

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the scratch page included."""
        return max(self.kv_bytes, 0) // self.bytes_per_page

    @property
    def num_tokens(self) -> int:
        """Tokens that sequences can keep at once."""
        return max(self.num_pages - 1, 0) * PAGE_SIZE

    def table(self, max_model_len: int) -> str:
        """Format the budget for a human."""
        full = (self.num_pages - 1) // pages_for(max_model_len) if self.num_pages > 1 else 0
        rows = [
            ("device limit", "none set" if self.limit_bytes is None else _gib(self.limit_bytes)),
            ("weights", f"{_gib(self.weight_bytes)}, of them int4 {_gib(self.int4_bytes)}"),
            ("slots", _gib(self.state_bytes)),
            ("program temp", _gib(self.temp_bytes)),
            ("KV pages", f"{_gib(self.kv_bytes)} = {self.num_pages} pages of {PAGE_SIZE} tokens"),
            ("KV tokens", f"{self.num_tokens}"),
            ("streams at full context", f"{full} of {max_model_len} tokens"),
        ]
        return "\n".join(f"  {name:<24}{value}" for name, value in rows)

    def check(self, max_model_len: int) -> None:
        """Refuse a pool that does not hold one sequence of full length, or exceeds the device."""
        needed_bytes = self.weight_bytes + self.state_bytes + self.temp_bytes + self.kv_bytes
        if self.limit_bytes is not None and needed_bytes > self.limit_bytes:
            raise ConfigError(
                "weights, programs and KV pages exceed the device; lower --kv-cache-bytes:\n"
                + self.table(max_model_len)
            )
        if self.kv_bytes <= 0:
            raise ConfigError(
                "weights and programs leave the device no room for KV pages:\n"
                + self.table(max_model_len)
            )
        if self.num_tokens < max_model_len:
            raise ConfigError(
                f"one sequence of --max-model-len {max_model_len} does not fit the KV pages, "
                f"which hold {self.num_tokens} tokens; lower it, or raise --kv-cache-bytes:\n"
                + self.table(max_model_len)
            )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
