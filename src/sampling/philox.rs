//! Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11, "Parallel random numbers: as
//! easy as 1, 2, 3"). A draw is a function of a request's own seed and its own step, so a token
//! depends neither on its neighbours in the batch nor on the order of launches.

/// The 64 bits that a request draws at a step: key `seed`, counter `step`.
pub(crate) fn draw(seed: i64, step: i64) -> u64 {
    let halves = |x: i64| [x as u32, (x as u64 >> 32) as u32];
    let [c0, c1] = halves(step);
    let [low, high, _, _] = philox4x32_10([c0, c1, 0, 0], halves(seed));
    (high as u64) << 32 | low as u64
}

fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let p0 = 0xD251_1F53u64 * counter[0] as u64;
        let p1 = 0xCD9E_8D57u64 * counter[2] as u64;
        counter = [
            (p1 >> 32) as u32 ^ counter[1] ^ key[0],
            p1 as u32,
            (p0 >> 32) as u32 ^ counter[3] ^ key[1],
            p0 as u32,
        ];
        key = [
            key[0].wrapping_add(0x9E37_79B9),
            key[1].wrapping_add(0xBB67_AE85),
        ];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answers that Random123 publishes for its philox4x32-10.
    #[test]
    fn known_answers() {
        assert_eq!(
            philox4x32_10([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox4x32_10([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
    }

    #[test]
    fn halves_of_seed_and_step_all_count() {
        let base = draw(7, 5);
        for (seed, step) in [
            (8, 5),
            (7 + (1 << 32), 5),
            (7, 6),
            (7, 5 + (1 << 32)),
            (-7, 5),
        ] {
            assert_ne!(draw(seed, step), base, "seed {seed}, step {step}");
        }
        assert_eq!(draw(0, 0), 0xe169_c58d_6627_e8d5);
    }
}
