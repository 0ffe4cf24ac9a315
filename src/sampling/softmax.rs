//! Softmax weights and their exact sums.
//!
//! A weight is exp((x - row max) / T) in f32, by one sequence of IEEE operations that the CUDA
//! kernels repeat to the letter (`kernels/common/softmax.cuh`): no fused multiply-add, no library
//! exponential, so both backends see the same bits. Weights are summed as integers, in units of
//! 2^-62, so that a sum does not depend on its order: every chunking, thread count and route gives
//! the same mass.

/// log2 of the integer mass of the greatest weight, 1.
const UNIT_LOG2: i32 = 62;

/// The softmax of one row, up to its normalisation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Softmax {
    max: f32,
    /// Both sides of the quotient are scaled by this power of two, so that the difference of two
    /// finite values does not overflow.
    scale: f32,
    scaled_max: f32,
    scaled_temperature: f32,
}

impl Softmax {
    /// For a row with this maximum above -inf, at a temperature above 0.
    pub fn new(max: f32, temperature: f32) -> Self {
        // +inf logits share all the mass at every temperature, an infinite one included.
        let temperature = if max == f32::INFINITY {
            1.0
        } else {
            temperature
        };
        // Below 2^100 the difference to -f32::MAX still rounds to a finite value.
        let scale = if max < 2f32.powi(100) { 1.0 } else { 0.5 };
        Self {
            max,
            scale,
            scaled_max: max * scale,
            scaled_temperature: temperature * scale,
        }
    }

    /// (x - max) / T, at most 0; for what is above -inf.
    #[inline(always)]
    pub fn exponent(&self, x: f32) -> f32 {
        let z = (x * self.scale - self.scaled_max) / self.scaled_temperature;
        if x == self.max {
            0.0
        } else {
            z
        }
    }

    /// The weight of a logit, in [0, 1]: 1 at the row's maximum, 0 for -inf and NaN.
    #[inline(always)]
    pub fn weight(&self, x: f32) -> f32 {
        let z = self.exponent(x);
        // Below -43 the weight is under one unit of mass.
        let counts = (x > f32::NEG_INFINITY) & (z >= -43.0);
        let w = exp(if counts { z } else { 0.0 });
        if counts {
            w
        } else {
            0.0
        }
    }

    /// The weight as an integer, in units of 2^-62.
    #[inline(always)]
    pub fn mass(&self, x: f32) -> u64 {
        mass(self.weight(x))
    }

    /// The log-probability of a logit in a set whose mass has this logarithm.
    pub fn log_weight(&self, x: f32, log_mass: f64) -> f32 {
        if self.max == f32::INFINITY && x != self.max {
            return f32::NEG_INFINITY;
        }
        (self.exponent(x) as f64 - log_mass) as f32
    }

    /// The mass of a slice of logits that `keep(index, logit)` admits.
    #[inline(always)]
    pub fn sum(&self, row: &[f32], keep: impl Fn(usize, f32) -> bool) -> u128 {
        const BLOCK: usize = 256;
        let mut total = 0u128;
        let mut weights = [0f32; BLOCK];
        for (c, block) in row.chunks(BLOCK).enumerate() {
            for (i, (w, &x)) in weights.iter_mut().zip(block).enumerate() {
                let weight = self.weight(x);
                *w = if keep(c * BLOCK + i, x) { weight } else { 0.0 };
            }
            // Each mass in digits of 22, 20 and 20 bits, which i32 vectors convert and hold: 256 of
            // a digit stay below 2^31.
            let mut digits = [0i32; 3];
            for &w in &weights[..block.len()] {
                let mut rest = w * (1u32 << 22) as f32;
                for digit in &mut digits {
                    // SAFETY: `rest` is from 0 to 2^22.
                    let whole = unsafe { rest.to_int_unchecked::<i32>() };
                    *digit += whole;
                    rest = (rest - whole as f32) * (1u32 << 20) as f32;
                }
            }
            total += digits
                .into_iter()
                .fold(0u128, |sum, digit| (sum << 20) + digit as u128);
        }
        total
    }
}

/// A weight in [0, 1] as an integer, in units of 2^-62, rounded down.
#[inline(always)]
pub(crate) fn mass(weight: f32) -> u64 {
    // Exact: a power of two. i64 is one instruction where u64 takes several.
    (weight * (1u64 << UNIT_LOG2) as f32) as i64 as u64
}

/// The mass as f64, in units of the greatest weight: by halves, as the kernels convert it.
pub(crate) fn to_f64(mass: u128) -> f64 {
    let raw = (mass >> 64) as u64 as f64 * TWO_64 + mass as u64 as f64;
    raw / (1u64 << UNIT_LOG2) as f64
}

pub(crate) const TWO_64: f64 = 18446744073709551616.0;

/// The least integer mass that is not below `p` times `total`, for a p between 0 and 1: tokens are
/// kept while the mass before them is below it.
pub(crate) fn nucleus(p: f32, total: u128) -> u128 {
    let exponent = p.to_bits() >> 23;
    // p is a fraction of 24 bits over 2^shift, and no mass of a row has more than 93.
    let fraction = p.to_bits() & 0x7f_ffff | if exponent > 0 { 0x80_0000 } else { 0 };
    let shift = 150 - exponent.max(1);
    let product = total * fraction as u128;
    let rounded_up = |shift| (product + ((1u128 << shift) - 1)) >> shift;
    match shift {
        0..=126 => rounded_up(shift),
        _ => (product > 0) as u128,
    }
}

/// floor(total * draw / 2^64): the point of the CDF that a 64-bit draw falls on.
pub(crate) fn inverted(total: u128, draw: u64) -> u128 {
    let low = (total as u64 as u128 * draw as u128) >> 64;
    (total >> 64) * draw as u128 + low
}

/// exp(z) for -43 <= z <= 0 in f32, within 2 units in the last place; exp(0) = 1.
///
/// z = n ln 2 + r with the product n ln 2 in two parts, the first exact; a polynomial in r (the
/// minimax coefficients of Cephes' `expf`); 2^n by its bits.
#[inline(always)]
#[allow(clippy::excessive_precision)] // As published, and as the kernels spell them.
fn exp(z: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer.
    let shifted = z * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = z - n * 0.693359375;
    let r = r - n * -2.12194440e-4;
    let p = 1.9875691500e-4;
    let p = p * r + 1.3981999507e-3;
    let p = p * r + 8.3334519073e-3;
    let p = p * r + 4.1665795894e-2;
    let p = p * r + 1.6666665459e-1;
    let p = p * r + 0.5;
    let e = p * (r * r) + r + 1.0;
    let bias = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    e * f32::from_bits(((bias + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut worst = 0f64;
        for i in 0..=4_300_000 {
            let z = -(i as f32) * 1e-5;
            let want = (z as f64).exp();
            worst = worst.max(((exp(z) as f64 - want) / want).abs());
        }
        assert!(worst < 2.4e-7, "relative error {worst:e}");
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn weights_of_special_values() {
        let finite = Softmax::new(2.0, 1.0);
        assert_eq!(finite.weight(2.0), 1.0);
        assert_eq!(finite.weight(f32::NEG_INFINITY), 0.0);
        assert_eq!(finite.weight(f32::NAN), 0.0);
        assert_eq!(finite.weight(-1e30), 0.0);
        let infinite = Softmax::new(f32::INFINITY, f32::INFINITY);
        assert_eq!(
            (infinite.weight(f32::INFINITY), infinite.weight(f32::MAX)),
            (1.0, 0.0)
        );
        let flat = Softmax::new(f32::MAX, f32::INFINITY);
        assert_eq!((flat.weight(f32::MAX), flat.weight(f32::MIN)), (1.0, 1.0));
        assert_eq!(flat.weight(f32::NEG_INFINITY), 0.0);
        let wide = Softmax::new(f32::MAX, 1e38);
        let want = (2.0 * f32::MIN as f64 / 1e38f32 as f64) as f32;
        assert!((wide.exponent(f32::MIN) - want).abs() < 1e-6);
        assert!((wide.weight(f32::MIN) as f64 - (want as f64).exp()).abs() < 1e-9);
        let sharp = Softmax::new(1.0, 1e-30);
        assert_eq!((sharp.weight(1.0), sharp.weight(0.999)), (1.0, 0.0));
    }

    #[test]
    fn masses_are_exact_integers() {
        assert_eq!(mass(1.0), 1 << 62);
        assert_eq!(mass(0.5), 1 << 61);
        assert_eq!(mass(0.0), 0);
        assert_eq!(to_f64(3 << 62), 3.0);
        let softmax = Softmax::new(0.0, 1.0);
        let row: Vec<f32> = (0..1000).map(|i| -(i as f32) * 0.01).collect();
        let one_by_one: u128 = row.iter().map(|&x| softmax.mass(x) as u128).sum();
        assert_eq!(softmax.sum(&row, |_, _| true), one_by_one);
        let row = [0f32; 600];
        assert_eq!(softmax.sum(&row, |i, _| i % 2 == 0), 300 << 62);
    }

    #[test]
    fn points_of_the_cdf() {
        assert_eq!(nucleus(0.5, 1 << 80), 1 << 79);
        assert_eq!(nucleus(0.5, (1 << 80) + 1), (1 << 79) + 1);
        assert_eq!(nucleus(0.75, (1 << 92) + 1), (3 << 90) + 1);
        assert_eq!(nucleus(f32::from_bits(1), 1 << 92), 1);
        assert_eq!(nucleus(2f32.powi(-100), 3 << 90), 1);
        assert_eq!(nucleus(2f32.powi(-64), (1 << 92) + 1), (1 << 28) + 1);
        assert_eq!(
            nucleus(1e-9, 1 << 62),
            (1e-9f32 as f64 * (1u64 << 62) as f64).ceil() as u128
        );
        assert_eq!(inverted(1 << 80, 1 << 63), 1 << 79);
        assert_eq!(inverted(1 << 80, 0), 0);
        assert!(inverted((1 << 80) + 5, u64::MAX) < (1 << 80) + 5);
    }
}
