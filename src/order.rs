//! The order of all selection, once, for the CPU.
//!
//! Numbers are compared as numbers: -inf < finite (subnormals included) < +inf, -0 equals +0, and
//! NaN ranks below -inf. Equal values are ordered by position, the lower position first. `key` maps
//! a value to an integer that compares alike, and `rank` appends the position, so that no two
//! elements of a row are ever equal and a set of the largest is always one well-defined set.

/// Key of every NaN: below the key of -inf.
pub const NAN_KEY: u32 = 0;
/// Key of -inf. What can be selected as a token has a greater key.
pub const NEG_INFINITY_KEY: u32 = 0x007f_ffff;

/// Ordered-integer image of `x`: the sign-flipped bits, with both zeros and all NaNs made one.
#[inline(always)]
pub fn key(x: f32) -> u32 {
    if x.is_nan() {
        return NAN_KEY;
    }
    // -0 + 0 is +0.
    let bits = (x + 0.0).to_bits();
    if bits >> 31 == 1 {
        !bits
    } else {
        bits | 0x8000_0000
    }
}

/// The value with this key: the inverse of [`key`], NaN for every key below that of -inf.
#[inline(always)]
pub fn value(key: u32) -> f32 {
    if key < NEG_INFINITY_KEY {
        f32::NAN
    } else if key >> 31 == 1 {
        f32::from_bits(key & 0x7fff_ffff)
    } else {
        f32::from_bits(!key)
    }
}

/// One integer whose descending order is the order of this module.
#[inline(always)]
pub fn rank(x: f32, position: u32) -> u64 {
    (key(x) as u64) << 32 | !position as u64
}

/// The key inside a [`rank`].
#[inline(always)]
pub fn rank_key(rank: u64) -> u32 {
    (rank >> 32) as u32
}

/// The position inside a [`rank`].
#[inline(always)]
pub fn rank_position(rank: u64) -> u32 {
    !(rank as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_compare_as_numbers_do() {
        let ascending = [
            f32::NEG_INFINITY,
            f32::MIN,
            -1.0,
            -f32::MIN_POSITIVE,
            -f32::from_bits(1),
            0.0,
            f32::from_bits(1),
            f32::MIN_POSITIVE,
            1.0,
            f32::MAX,
            f32::INFINITY,
        ];
        for pair in ascending.windows(2) {
            assert!(key(pair[0]) < key(pair[1]), "{} < {}", pair[0], pair[1]);
        }
        assert_eq!(key(-0.0), key(0.0));
        for nan in [f32::NAN, -f32::NAN, f32::from_bits(0xff80_0001)] {
            assert!(key(nan) < key(f32::NEG_INFINITY));
        }
    }

    #[test]
    fn value_inverts_key() {
        for x in [
            f32::NEG_INFINITY,
            f32::MIN,
            -1.5,
            -f32::from_bits(1),
            0.0,
            3.0,
            f32::INFINITY,
        ] {
            assert_eq!(value(key(x)), x);
        }
        assert!(value(NAN_KEY).is_nan());
    }

    #[test]
    fn equal_values_rank_by_position() {
        assert!(rank(1.0, 0) > rank(1.0, 1));
        assert!(rank(-0.0, 0) > rank(0.0, 1));
        assert!(rank(1.0, 7) > rank(0.5, 0));
        assert_eq!(
            (rank_key(rank(2.5, 9)), rank_position(rank(2.5, 9))),
            (key(2.5), 9)
        );
    }
}
