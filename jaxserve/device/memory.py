"""What fits the device: the page pools sized from its memory, and the table that says how.

It does arithmetic on bytes and knows no arrays.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.device.plan import PAGE_SIZE, pages_for
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.models.kv_cache import KVDtype, bytes_per_page
from jaxserve.models.specs import PackedForm
from jaxserve.models.windows import Windows

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMix:
    """How KV bytes are shared out to the two kinds of page.

    Attributes:
        kv_dtype: of what the pages hold.
        num_working_pages: sliding pages for what runs: the windows of all rows and one chunk.
        pages_per_point: sliding pages of a resume point.
        tokens_per_point: cached tokens for which there shall be one resume point.
        least_points: but no fewer than these: each row is to leave one.
    """

    kv_dtype: KVDtype
    bytes_per_page: int
    bytes_per_sliding_page: int
    num_working_pages: int
    pages_per_point: int
    tokens_per_point: int
    least_points: int

    @classmethod
    def of_model(
        cls,
        config: ModelConfig,
        kv_dtype: KVDtype,
        *,
        max_batch: int,
        chunk_tokens: int,
        tokens_per_point: int,
    ) -> "PageMix":
        """Return the mix of a model, for so many rows and tokens of the largest chunk."""
        windows = Windows(page_size=PAGE_SIZE, window=config.window)
        return cls(
            kv_dtype=kv_dtype,
            bytes_per_page=bytes_per_page(config, "full", PAGE_SIZE, kv_dtype),
            bytes_per_sliding_page=bytes_per_page(config, "sliding", PAGE_SIZE, kv_dtype),
            num_working_pages=max_batch * windows.row_pages + pages_for(chunk_tokens),
            pages_per_point=windows.point_pages,
            tokens_per_point=tokens_per_point,
            least_points=max_batch,
        )

    def num_pages(self, kv_bytes: int) -> int:
        """Return the full-attention pages that fit, the scratch page included."""
        most = max(kv_bytes, 0) // max(self.bytes_per_page, 1)
        return bisect_right(range(1, most + 1), kv_bytes, key=self._num_bytes)

    def num_sliding_pages(self, num_pages: int) -> int:
        """Return the sliding pages beside so many others; one for each is all there can be."""
        num_points = -(-max(num_pages - 1, 0) * PAGE_SIZE // self.tokens_per_point)
        num_points = max(num_points, self.least_points)
        return min(num_pages, 1 + self.num_working_pages + num_points * self.pages_per_point)

    def _num_bytes(self, num_pages: int) -> int:
        num_sliding_pages = self.num_sliding_pages(num_pages)
        return num_pages * self.bytes_per_page + num_sliding_pages * self.bytes_per_sliding_page


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """The two sizes, in bytes, that a device's memory decides.

    Attributes:
        kv_bytes: what the page pools may take.
        temp_bytes: most that one program needs beside its arguments and results.
    """

    kv_bytes: int
    temp_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Where the device's bytes go.

    Attributes:
        limit_bytes: what may be used in all (on a CPU the machine's memory); None: unknown.
        packed_bytes: of the weights, those of packed leaves, by their form.
        state_bytes: what the slots keep between steps: grammars, penalties and biases by token.
        temp_bytes: most that one program needs while it runs.
        kv_bytes: what the page pools may take.
    """

    limit_bytes: int | None
    weight_bytes: int
    packed_bytes: Mapping[PackedForm, int]
    state_bytes: int
    temp_bytes: int
    kv_bytes: int
    mix: PageMix

    @property
    def num_pages(self) -> int:
        """Full-attention pages, the scratch page included."""
        return self.mix.num_pages(self.kv_bytes)

    @property
    def num_sliding_pages(self) -> int:
        """Sliding layers' pages, the scratch page included."""
        return self.mix.num_sliding_pages(self.num_pages)

    @property
    def num_tokens(self) -> int:
        """Tokens that sequences can keep at once."""
        return max(self.num_pages - 1, 0) * PAGE_SIZE

    @property
    def num_resume_points(self) -> int:
        """Resume points that can be kept beside full windows of all rows and a chunk."""
        num_left = self.num_sliding_pages - 1 - self.mix.num_working_pages
        return max(num_left, 0) // self.mix.pages_per_point

    def table(self, max_model_len: int) -> str:
        """Format the budget for a human."""
        full = (self.num_pages - 1) // pages_for(max_model_len) if self.num_pages > 1 else 0
        kinds = [
            ("KV pages, full", self.num_pages, self.mix.bytes_per_page),
            ("KV pages, sliding", self.num_sliding_pages, self.mix.bytes_per_sliding_page),
        ]
        packed = ", ".join(f"{form} {_gib(size)}" for form, size in self.packed_bytes.items())
        rows = [
            ("device limit", "none set" if self.limit_bytes is None else _gib(self.limit_bytes)),
            ("weights", f"{_gib(self.weight_bytes)}, of them {packed}"),
            ("slots and grammars", _gib(self.state_bytes)),
            ("program temp", _gib(self.temp_bytes)),
            *(
                (
                    name,
                    f"{_gib(count * size)} = {count} pages of {PAGE_SIZE} tokens,"
                    f" {self.mix.kv_dtype}",
                )
                for name, count, size in kinds
            ),
            ("KV tokens", f"{self.num_tokens}"),
            (
                "resume points",
                f"{self.num_resume_points} beside full rows, one in"
                f" {self.mix.tokens_per_point} tokens wanted",
            ),
            ("streams at full context", f"{full} of {max_model_len} tokens"),
        ]
        return "\n".join(f"  {name:<24}{value}" for name, value in rows)

    def check(self, max_model_len: int) -> None:
        """Refuse pools that do not hold one sequence of full length, or exceed the device."""
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
