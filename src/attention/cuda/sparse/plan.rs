//! From the sizes of an attention to kernels and launches: a pure function.
//!
//! What a row's bits depend on, which is the kernel and the length of a segment, follows from the
//! sizes of a row alone. How many rows there are decides only whether the segments of a unit have a
//! block each, or a cluster, or share a block.

use super::super::super::sparse::Dims;

/// What of a device a plan depends on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Props {
    pub multiprocessors: usize,
    /// Bytes that a block can have.
    pub shared_per_block: usize,
    /// Bytes of all blocks of a multiprocessor.
    pub shared_per_multiprocessor: usize,
    /// Whether kernels for compute capability 9.0 run.
    pub sm90: bool,
    /// How many clusters of [`Few::BLOCKS`] blocks a launch may have: those that run at once.
    pub clusters: usize,
}

/// The form of [`Kind::Latent`] for few rows: a segment by a cluster. It gives the same bits.
pub(super) struct Few;

impl Few {
    pub const BLOCKS: usize = 8;
    pub const THREADS: usize = 256;
    /// Keys of a segment: each block has 64.
    const SEGMENT: usize = 64 * Self::BLOCKS;
    /// Dynamic shared memory of a block: `kBytes` of `kernels/attention/sm90_sparse_latent_few.cuh`.
    pub const SHARED_BYTES: usize = 26 * 8192 + 6272 + 1024;
}

/// A kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// By multiply-adds: f32, and sizes that no other has. So many columns a thread: 1 or 4.
    Fma(usize),
    /// By tensor cores: keys and values of up to 64, 128 or 256, and tiles of 16 heads a block.
    Narrow(usize, usize),
    /// Keys of up to 576 and values of up to 512.
    Wide,
    /// The same with values that are the first numbers of the keys, and tiles of 16 heads a block.
    Shared(usize),
    /// Multi-head latent attention on compute capability 9.0, with keys of 512 or 576.
    Latent(usize),
    /// Blocks of 64 or 128 keys on compute capability 9.0: tiles of rows, with keys and values of 64
    /// or 128.
    Tile(usize),
}

impl Kind {
    /// The heads and columns that a block has.
    fn tile(self) -> (usize, usize) {
        match self {
            Self::Fma(columns) => (8, 128 * columns),
            Self::Narrow(dim, tiles) => (16 * tiles, dim),
            Self::Wide => (16, 512),
            Self::Shared(tiles) => (16 * tiles, 512),
            Self::Latent(_) => (64, 512),
            Self::Tile(dim) => (64, dim),
        }
    }

    pub fn threads(self) -> usize {
        match self {
            Self::Fma(_) | Self::Wide => 128,
            Self::Narrow(_, tiles) | Self::Shared(tiles) => 128 * tiles,
            Self::Latent(_) | Self::Tile(_) => 384,
        }
    }

    /// Dynamic shared memory of a block: `Shape::BYTES` of `kernels/attention/sparse_mma.cuh`, and
    /// `latent::Memory::BYTES` and `tile::bytes` of `sm90_sparse_latent.cuh` and `sm90_sparse_tile.cuh`.
    pub fn shared_bytes(self) -> usize {
        let mma = |key: usize, value: usize, shared: bool, tiles: usize| {
            let keys = if key <= 128 { 64 } else { 32 };
            let pitch = |dim: usize| 2 * dim + 16;
            let stage = keys * (pitch(key) + if shared { 0 } else { pitch(value) });
            16 * tiles * pitch(key)
                + 2 * stage
                + 16 * tiles * (2 * pitch(keys) + 16)
                + 2 * 4 * keys * 8
        };
        match self {
            Self::Fma(_) => 0,
            Self::Narrow(dim, tiles) => mma(dim, dim, false, tiles),
            Self::Wide => mma(576, 512, false, 1),
            Self::Shared(tiles) => mma(576, 512, true, tiles),
            Self::Latent(key) => 3 * 128 * key + if key > 512 { 1 } else { 4 } * 8192 + 2048,
            Self::Tile(dim) => 10 * 128 * dim + 44_216 + 1024,
        }
    }

    /// Blocks that are at work on a multiprocessor at one time, about.
    fn resident(self, props: &Props) -> usize {
        match self.shared_bytes() {
            0 => 4,
            bytes => (props.shared_per_multiprocessor / (bytes + 1024)).clamp(1, 4),
        }
    }
}

/// Floats of a part: the values of a tile, and two sums a head.
fn part_floats(heads: usize, columns: usize) -> usize {
    heads * (columns + 2)
}

/// Floats of the workspace of a device: parts of the largest kind, two a multiprocessor.
pub(super) fn workspace_floats(multiprocessors: usize) -> usize {
    2 * multiprocessors * part_floats(64, 512)
}

/// A plan.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub kind: Kind,
    pub slot_heads: usize,
    pub slot_columns: usize,
    pub head_tiles: usize,
    pub column_tiles: usize,
    /// Units of a row.
    pub tiles: usize,
    /// Keys of a segment.
    pub segment: usize,
    pub segments: usize,
    /// Whether every segment has a block of its own, or a cluster.
    pub split: bool,
    /// Whether it is a cluster.
    pub few: bool,
    /// Units of all rows, and of a launch.
    pub units: usize,
    pub units_per_launch: usize,
    /// Blocks that walk over the work of a launch; `None`: all of it has blocks of its own.
    pub walkers: Option<usize>,
    /// Rows that share what they read.
    pub tile_rows: usize,
    /// Floats of the workspace that are used.
    pub part_floats: usize,
}

/// The kernel for these sizes.
fn kind(dims: &Dims, half: bool, values_of_keys: bool, scale: f32, props: &Props) -> Kind {
    let (key, value, group) = (dims.key_dim, dims.value_dim, dims.heads / dims.kv_heads);
    let latent = Kind::Latent(key);
    if half
        && values_of_keys
        && props.sm90
        && matches!(key, 512 | 576)
        && value == 512
        && group > 32
        && latent.shared_bytes() <= props.shared_per_block
    {
        return latent;
    }
    let tile = Kind::Tile(key);
    if half
        && props.sm90
        && dims.block >= 64
        // Greatest scores are found before they are scaled.
        && scale > 0.
        && matches!(key, 64 | 128)
        && value == key
        && group <= 64
        && tile.shared_bytes() <= props.shared_per_block
    {
        return tile;
    }
    let tiles: &[usize] = if group > 16 { &[2, 1] } else { &[1] };
    let fits = |kind: &Kind| kind.shared_bytes() <= props.shared_per_block;
    let found = if !half {
        None
    } else if let Some(dim) = [64, 128, 256]
        .into_iter()
        .find(|&dim| key.max(value) <= dim)
    {
        let kinds = tiles.iter().map(|&tiles| Kind::Narrow(dim, tiles));
        kinds.into_iter().find(fits)
    } else if key <= 576 && value <= 512 {
        if values_of_keys {
            let kinds = tiles.iter().map(|&tiles| Kind::Shared(tiles));
            kinds.into_iter().find(fits)
        } else {
            Some(Kind::Wide).filter(fits)
        }
    } else {
        None
    };
    found.unwrap_or(Kind::Fma(if value <= 128 { 1 } else { 4 }))
}

/// `kRows` in `kernels/attention/sm90_sparse_tile.cuh`: what a tile has room for.
const TILE_ROWS: usize = 64;

/// `rows_each` is the number of rows of a sequence, 0 where that is not known.
pub(super) fn plan(
    dims: &Dims,
    half: bool,
    values_of_keys: bool,
    scale: f32,
    rows_each: usize,
    props: &Props,
) -> Plan {
    /// Keys of a segment, where no list has more than 32 of them.
    const SEGMENT: usize = 512;
    const SEGMENTS: usize = 32;
    /// Segments are made of whole blocks of keys, of every kernel.
    const MULTIPLE: usize = 128;
    /// What a grid can have, and more than any device needs.
    const GRID: usize = 1 << 30;

    let kind = kind(dims, half, values_of_keys, scale, props);
    let (slot_heads, slot_columns) = kind.tile();
    let head_tiles = (dims.heads / dims.kv_heads).div_ceil(slot_heads);
    let column_tiles = dims.value_dim.div_ceil(slot_columns);
    let tiles = dims.kv_heads * head_tiles * column_tiles;
    let tile_rows = match kind {
        // As many as fit, but not fewer tiles than there are multiprocessors for.
        Kind::Tile(_) => {
            let most = (2 * (64 / (dims.heads / dims.kv_heads))).min(TILE_ROWS);
            let each = if rows_each == 0 { most } else { rows_each };
            let enough = (dims.rows * dims.kv_heads).div_ceil(props.multiprocessors);
            most.min(each).min(enough).max(1)
        }
        _ => 1,
    };
    let units = dims.rows.div_ceil(tile_rows) * tiles;
    let keys = dims.width * dims.block;
    let segment = keys
        .div_ceil(SEGMENTS)
        .next_multiple_of(MULTIPLE)
        .max(SEGMENT);
    let segments = keys.div_ceil(segment).max(1);
    let part = part_floats(slot_heads, slot_columns);
    let parts = workspace_floats(props.multiprocessors) / part;

    // Blocks at a time, and how many segments one after the other that makes.
    let blocks = props.multiprocessors * kind.resident(props);
    let together = units.div_ceil(blocks) * segments;
    let apart = (units * segments).div_ceil(blocks) + 1;
    // What is apart is written and read once more.
    let latent = matches!(kind, Kind::Latent(_));
    let few = latent
        && segment == Few::SEGMENT
        && Few::SHARED_BYTES <= props.shared_per_block
        && units.saturating_mul(segments) <= props.clusters;
    let split = !matches!(kind, Kind::Tile(_))
        && segments > 1
        && (few || 8 * apart < 7 * together)
        && segments <= parts;
    let (units_per_launch, used) = if split {
        let units = units.min(parts / segments);
        (units, units * segments)
    } else {
        let used = if latent && segments > 1 {
            units.min(props.multiprocessors)
        } else {
            0
        };
        (units.min(GRID / Few::BLOCKS), used)
    };
    Plan {
        kind,
        slot_heads,
        slot_columns,
        head_tiles,
        column_tiles,
        tiles,
        segment,
        segments,
        split,
        few,
        units,
        units_per_launch,
        walkers: (latent && !few).then_some(props.multiprocessors),
        tile_rows,
        part_floats: used * part,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Props = Props {
        multiprocessors: 132,
        shared_per_block: 232_448,
        shared_per_multiprocessor: 233_472,
        sm90: true,
        clusters: 14,
    };
    /// The least that a device of compute capability 8.0 or later has.
    const SMALL: Props = Props {
        multiprocessors: 20,
        shared_per_block: 101_376,
        shared_per_multiprocessor: 102_400,
        sm90: false,
        clusters: 0,
    };

    fn dims(rows: usize, heads: [usize; 2], dim: [usize; 2], width: usize, block: usize) -> Dims {
        Dims {
            rows,
            heads: heads[0],
            kv_heads: heads[1],
            key_dim: dim[0],
            value_dim: dim[1],
            width,
            lists: 1,
            block,
        }
    }

    #[test]
    fn kernels() {
        for (heads, dim, block, of_keys, wanted, small) in [
            (
                [128, 1],
                [576, 512],
                1,
                true,
                Kind::Latent(576),
                Kind::Shared(1),
            ),
            (
                [64, 1],
                [512, 512],
                1,
                true,
                Kind::Latent(512),
                Kind::Shared(1),
            ),
            (
                [32, 1],
                [576, 512],
                1,
                true,
                Kind::Shared(2),
                Kind::Shared(1),
            ),
            ([16, 1], [576, 512], 1, false, Kind::Wide, Kind::Fma(4)),
            (
                [32, 8],
                [128, 128],
                1,
                false,
                Kind::Narrow(128, 1),
                Kind::Narrow(128, 1),
            ),
            (
                [32, 8],
                [128, 128],
                64,
                false,
                Kind::Tile(128),
                Kind::Narrow(128, 1),
            ),
            (
                [32, 1],
                [96, 96],
                128,
                false,
                Kind::Narrow(128, 2),
                Kind::Narrow(128, 2),
            ),
            (
                [4, 4],
                [192, 128],
                1,
                false,
                Kind::Narrow(256, 1),
                Kind::Narrow(256, 1),
            ),
            ([4, 4], [600, 700], 1, false, Kind::Fma(4), Kind::Fma(4)),
        ] {
            let dims = dims(1, heads, dim, 64, block);
            assert_eq!(kind(&dims, true, of_keys, 0.1, &H200), wanted, "{dims:?}");
            assert_eq!(kind(&dims, true, of_keys, 0.1, &SMALL), small, "{dims:?}");
            assert!(matches!(
                kind(&dims, false, of_keys, 0.1, &H200),
                Kind::Fma(_)
            ));
            // Tiles take scores times a positive number alone.
            for scale in [0., -0.1, f32::NAN] {
                let other = kind(&dims, true, of_keys, scale, &H200);
                assert!(!matches!(other, Kind::Tile(_)));
                assert!(other == wanted || matches!(wanted, Kind::Tile(_)));
            }
            assert!(wanted.shared_bytes() <= H200.shared_per_block);
            assert!(small.shared_bytes() <= SMALL.shared_per_block);
        }
    }

    /// What a row's bits depend on is the same in any batch, and every launch fits the workspace.
    #[test]
    fn rows_do_not_matter() {
        for props in [&H200, &SMALL] {
            for half in [true, false] {
                for (heads, dim, of_keys) in [
                    ([128, 1], [576, 512], true),
                    ([128, 128], [192, 128], false),
                    ([32, 8], [128, 128], false),
                    ([32, 32], [128, 128], false),
                    ([16, 16], [64, 64], false),
                    ([64, 1], [64, 64], false),
                    ([1, 1], [3000, 5000], false),
                ] {
                    for (width, block) in
                        [(0, 1), (1, 1), (600, 1), (2048, 1), (1 << 20, 1), (33, 64)]
                    {
                        let of = |rows| {
                            let dims = dims(rows, heads, dim, width, block);
                            plan(&dims, half, of_keys, 0.1, 0, props)
                        };
                        let alone = of(1);
                        assert!(alone.segments >= 1 && alone.segments <= 32);
                        assert!(alone.segments * alone.segment >= width * block);
                        assert_eq!(alone.segment % 128, 0);
                        for rows in [1, 2, 8, 64, 100, 4096, 1 << 20] {
                            let plan = of(rows);
                            assert_eq!(plan.kind, alone.kind);
                            assert_eq!(
                                (plan.segment, plan.segments),
                                (alone.segment, alone.segments)
                            );
                            assert!(plan.part_floats <= workspace_floats(props.multiprocessors));
                            assert!(plan.units_per_launch >= 1);
                            assert!((1..=TILE_ROWS).contains(&plan.tile_rows));
                            let jobs =
                                plan.units_per_launch * if plan.split { plan.segments } else { 1 };
                            assert!(jobs <= 1 << 30);
                            assert_eq!(plan.units, rows.div_ceil(plan.tile_rows) * plan.tiles);
                        }
                    }
                }
            }
        }
    }

    /// Few rows are split over the device, and many are not.
    #[test]
    fn splits() {
        let latent = |rows| {
            plan(
                &dims(rows, [128, 1], [576, 512], 2048, 1),
                true,
                true,
                0.1,
                0,
                &H200,
            )
        };
        assert!(latent(1).split && latent(32).split);
        assert!(!latent(64).split && !latent(4096).split);
        assert!(latent(1).few && latent(1).walkers.is_none());
        assert!(!latent(2).few && !latent(4096).few);
        let tile = |rows, each| {
            plan(
                &dims(rows, [32, 8], [128, 128], 32, 64),
                true,
                false,
                0.1,
                each,
                &H200,
            )
        };
        assert_eq!(tile(8, 1).tile_rows, 1);
        assert_eq!(tile(64, 0).tile_rows, 4);
        assert_eq!(tile(4096, 0).tile_rows, 32);
        assert_eq!(tile(4096, 2).tile_rows, 2);
    }

    /// Clusters have segments of one length, and no more of them than run at once, unless they are forced.
    #[test]
    fn clusters() {
        let of = |rows, heads, width, block, clusters| {
            let dims = dims(rows, [heads, 1], [576, 512], width, block);
            plan(&dims, true, true, 0.1, 0, &Props { clusters, ..H200 })
        };
        for (rows, heads, width, block, few, split) in [
            (1, 128, 2048, 1, true, true),
            (1, 128, 512, 1, true, false),
            (1, 128, 1, 1, true, false),
            (3, 128, 700, 1, true, true),
            (7, 128, 500, 1, true, false),
            (8, 128, 500, 1, false, false),
            (1, 64, 7168, 1, true, true),
            (1, 64, 7169, 1, false, true),
            (1, 64, 32, 64, true, true),
            (1, 128, 1 << 20, 1, false, true),
            (4096, 128, 2048, 1, false, false),
        ] {
            let plan = of(rows, heads, width, block, 14);
            assert_eq!(
                (plan.few, plan.split),
                (few, split),
                "{rows} rows of {width}"
            );
            let plain = of(rows, heads, width, block, 0);
            assert!(!plain.few);
            let forced = of(rows, heads, width, block, usize::MAX);
            assert_eq!(forced.few, width <= 32 * Few::SEGMENT);
            for plan in [&plain, &forced] {
                assert_eq!(
                    (plan.kind, plan.segment, plan.segments),
                    (forced.kind, forced.segment, forced.segments)
                );
                assert!(plan.part_floats <= workspace_floats(H200.multiprocessors));
            }
            assert_eq!(
                forced.split,
                forced.segments > 1 && (forced.few || plain.split)
            );
            let jobs = forced.units_per_launch * if forced.split { forced.segments } else { 1 };
            assert!(jobs * Few::BLOCKS <= 1 << 30);
        }
        assert!(!of(1, 32, 2048, 1, usize::MAX).few);
    }
}
