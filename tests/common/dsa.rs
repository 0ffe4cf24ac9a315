//! Cases of the DSA layer: what transformers computes (`scripts/dsa-fixtures.py`), for any device.

use super::attention::{numbers, refused, tensor, NONE};
use super::{normal, rng};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use candle_topk::attention::dsa::{
    DecodeBuffers, DecodeGraph, DsaAttention, DsaCache, DsaConfig, DsaOutput, Rope, RopeLayout,
};
use std::collections::HashMap;

pub const MODELS: [&str; 2] = ["deepseek_v32", "glm_moe_dsa"];
const TOKENS: usize = 72;
const CHUNK: usize = 40;
const PROMPT: usize = 64;

pub struct Fixture {
    pub config: DsaConfig,
    tensors: HashMap<String, Tensor>,
    device: Device,
    dtype: DType,
}

impl Fixture {
    pub fn load(name: &str, dtype: DType, device: &Device) -> Result<Self> {
        // In the program, so that it runs where there is no repository.
        let (json, data): (&str, &[u8]) = match name {
            "deepseek_v32" => (
                include_str!("../fixtures/deepseek_v32.json"),
                include_bytes!("../fixtures/deepseek_v32.safetensors"),
            ),
            "glm_moe_dsa" => (
                include_str!("../fixtures/glm_moe_dsa.json"),
                include_bytes!("../fixtures/glm_moe_dsa.safetensors"),
            ),
            other => candle_core::bail!("there is no fixture {other:?}"),
        };
        Ok(Self {
            config: DsaConfig::from_json(json)?,
            tensors: candle_core::safetensors::load_buffer(data, &Device::Cpu)?,
            device: device.clone(),
            dtype,
        })
    }

    fn hidden(&self, name: &str) -> Result<Tensor> {
        self.tensors[name]
            .to_dtype(self.dtype)?
            .to_device(&self.device)
    }

    fn builder(&self) -> VarBuilder<'static> {
        VarBuilder::from_tensors(self.tensors.clone(), self.dtype, &self.device)
    }

    pub fn layer(&self, layer: usize) -> Result<DsaAttention> {
        let rope = Rope::new(&self.config, 2 * TOKENS, &self.device)?;
        let vb = self.builder().pp(format!("model.layers.{layer}.self_attn"));
        DsaAttention::load(&self.config, layer, &rope, vb)
    }

    pub fn cache(&self, layer: usize, sequences: usize, capacity: usize) -> Result<DsaCache> {
        DsaCache::new(
            &self.config,
            layer,
            sequences,
            capacity,
            self.dtype,
            &self.device,
        )
    }

    /// What transformers chose in a run, `[rows]` of what each row sees of it.
    fn chosen(&self, run: &str) -> Result<Vec<Vec<u32>>> {
        let positions = &self.tensors[&format!("{run}.positions")];
        let (_, tokens, width) = positions.dims3()?;
        let first = first_of(run);
        let positions = positions.flatten_all()?.to_vec1::<i32>()?;
        let rows = positions.chunks(width).enumerate().map(|(row, positions)| {
            let last = (first + row % tokens) as u32;
            let mut seen: Vec<u32> = positions.iter().map(|&p| p as u32).collect();
            seen.retain(|&p| p <= last);
            seen.sort_unstable();
            seen
        });
        Ok(rows.collect())
    }

    /// The same as the layer takes it.
    fn positions(&self, run: &str) -> Result<Tensor> {
        let top = self.config.index_topk;
        let chosen = self.chosen(run)?;
        let mut data = vec![NONE; chosen.len() * top];
        for (to, from) in data.chunks_mut(top).zip(&chosen) {
            // In no particular place: sentinels may stand anywhere.
            for (i, &position) in from.iter().rev().enumerate() {
                to[top - 1 - i] = position;
            }
        }
        Tensor::from_vec(data, (chosen.len(), top), &self.device)
    }

    /// Whether the set of each row hangs on more than roundings: ReLU makes exact ties.
    fn clear(&self, run: &str) -> Result<Vec<bool>> {
        let scores = &self.tensors[&format!("{run}.scores")];
        let width = scores.dims()[2];
        let top = self.config.index_topk;
        let scores = scores.flatten_all()?.to_vec1::<f32>()?;
        let clear = scores.chunks(width).map(|row| {
            let mut seen: Vec<f32> = row.iter().copied().filter(|&x| x > -1e30).collect();
            seen.sort_unstable_by(|a, b| b.total_cmp(a));
            seen.len() <= top || seen[top - 1] - seen[top] > 1e-3 * (seen[0] - seen[seen.len() - 1])
        });
        Ok(clear.collect())
    }

    fn reference(&self, run: &str, what: &str) -> Result<Vec<f64>> {
        numbers(&self.tensors[&format!("{run}.{what}")])
    }
}

/// The position of a run's first token.
fn first_of(run: &str) -> usize {
    match run {
        "chunk" => CHUNK,
        "decode" => PROMPT,
        _ => 0,
    }
}

/// The greatest error as a part of the greatest value.
fn error(got: &[f64], wanted: &[f64]) -> f64 {
    assert_eq!(got.len(), wanted.len());
    let most = wanted.iter().fold(0f64, |most, x| most.max(x.abs()));
    let errors = got.iter().zip(wanted).map(|(a, b)| (a - b).abs());
    errors.fold(0f64, |most, error| {
        assert!(!error.is_nan());
        most.max(error)
    }) / most
}

/// A run of a fixture, with positions given or by the layer's own choice. Tokens of "decode" come
/// one by one, after a prompt.
fn run(fixture: &Fixture, run: &str, positions: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
    let layer = fixture.layer(0)?;
    let x = fixture.hidden("x")?;
    let mut cache = fixture.cache(0, 2, TOKENS)?;
    let first = first_of(run);
    if first > 0 {
        layer.forward(&x.narrow(1, 0, first)?, &mut cache, 0, None)?;
    }
    let tokens = fixture.tensors[&format!("{run}.out")].dims()[1];
    let steps = if run == "decode" { tokens } else { 1 };
    let each = tokens / steps;
    let top = fixture.config.index_topk;
    let (mut outs, mut chosen) = (Vec::new(), Vec::new());
    for step in 0..steps {
        let part = x.narrow(1, first + step * each, each)?;
        let given = match positions {
            Some(positions) => {
                let positions = positions.reshape((2, tokens, top))?;
                let positions = positions.narrow(1, step * each, each)?.contiguous()?;
                Some(positions.reshape((2 * each, top))?)
            }
            None => None,
        };
        let output = layer.forward(&part, &mut cache, 0, given.as_ref())?;
        assert_eq!(output.positions.dims(), [2 * each, top]);
        chosen.push(output.positions.reshape((2, each, top))?);
        outs.push(output.hidden);
    }
    assert_eq!(cache.lengths(), [first + tokens; 2]);
    let chosen = Tensor::cat(&chosen, 1)?.reshape((2 * tokens, top))?;
    Ok((Tensor::cat(&outs, 1)?, chosen))
}

/// f32, over the positions that transformers chose and over the layer's own.
pub fn matches_transformers(name: &str, device: &Device) -> Result<()> {
    let fixture = Fixture::load(name, DType::F32, device)?;
    let hidden = fixture.config.hidden_size;
    for case in ["below", "at", "whole", "chunk", "decode"] {
        let wanted = fixture.reference(case, "out")?;
        let most = wanted.iter().fold(0f64, |most, x| most.max(x.abs()));
        let (out, _) = run(&fixture, case, Some(&fixture.positions(case)?))?;
        let error = error(&numbers(&out)?, &wanted);
        assert!(error <= 1e-5, "{name}, {case}, positions given: {error:e}");

        let (out, positions) = run(&fixture, case, None)?;
        let out = numbers(&out)?;
        let positions = positions.to_device(&Device::Cpu)?.to_vec2::<u32>()?;
        let (chosen, clear) = (fixture.chosen(case)?, fixture.clear(case)?);
        let mut same = 0;
        for (row, positions) in positions.into_iter().enumerate() {
            let mut own: Vec<u32> = positions.into_iter().filter(|&p| p != NONE).collect();
            own.sort_unstable();
            if own != chosen[row] {
                assert!(
                    !clear[row],
                    "{name}, {case}, row {row}: {own:?} is chosen, not {:?}",
                    chosen[row]
                );
                assert_eq!(own.len(), chosen[row].len());
                continue;
            }
            same += 1;
            for i in row * hidden..(row + 1) * hidden {
                let error = (out[i] - wanted[i]).abs();
                assert!(
                    error <= 1e-5 * most,
                    "{name}, {case}, row {row}: {error:e} of {most}"
                );
            }
        }
        // Rows whose set hangs on roundings are few, and most of them come out the same.
        assert!(
            same * 10 >= chosen.len() * 9,
            "{name}, {case}: {same} of {}",
            chosen.len()
        );
    }
    Ok(())
}

/// The other RoPE layout in the indexer shows as soon as sequences are longer than K, and not before:
/// what transformers computes tells the layouts apart.
pub fn layouts_differ(name: &str, device: &Device) -> Result<()> {
    let mut fixture = Fixture::load(name, DType::F32, device)?;
    fixture.config.indexer_rope = match fixture.config.indexer_rope {
        RopeLayout::HalfSplit => RopeLayout::Interleaved,
        RopeLayout::Interleaved => RopeLayout::HalfSplit,
    };
    let (out, _) = run(&fixture, "at", None)?;
    let error = error(&numbers(&out)?, &fixture.reference("at", "out")?);
    assert!(error <= 1e-5, "{error:e}");
    let (_, positions) = run(&fixture, "whole", None)?;
    let positions = positions.to_device(&Device::Cpu)?.to_vec2::<u32>()?;
    let (chosen, clear) = (fixture.chosen("whole")?, fixture.clear("whole")?);
    let differ = positions.into_iter().zip(&chosen).zip(clear);
    let differ =
        differ.filter(|((own, wanted), clear)| *clear && wanted.iter().any(|p| !own.contains(p)));
    assert!(differ.count() > 50, "{name}");
    Ok(())
}

/// A shared layer attends to what the layer before it chose.
pub fn shares_positions(device: &Device) -> Result<()> {
    let fixture = Fixture::load("glm_moe_dsa", DType::F32, device)?;
    let (full, shared) = (fixture.layer(0)?, fixture.layer(1)?);
    let wanted = fixture.reference("shared", "out")?;
    let given = fixture.positions("whole")?;
    let x1 = fixture.hidden("x1")?;
    let mut cache = fixture.cache(1, 2, TOKENS)?;
    let output = shared.forward(&x1, &mut cache, 0, Some(&given))?;
    let got = error(&numbers(&output.hidden)?, &wanted);
    assert!(got <= 1e-5, "{got:e}");

    // From the layer itself: an ordinary tensor, handed on.
    let mut first = fixture.cache(0, 2, TOKENS)?;
    let chosen = full
        .forward(&fixture.hidden("x")?, &mut first, 0, None)?
        .positions;
    let mut cache = fixture.cache(1, 2, TOKENS)?;
    refused(
        shared.forward(&x1, &mut cache, 0, None),
        &["no indexer", "layer before"],
    );
    assert_eq!(cache.lengths(), [0, 0]);
    let output = shared.forward(&x1, &mut cache, 0, Some(&chosen))?;
    let clear = fixture.clear("whole")?;
    let (out, hidden) = (numbers(&output.hidden)?, fixture.config.hidden_size);
    let most = wanted.iter().fold(0f64, |most, x| most.max(x.abs()));
    for (row, _) in clear.iter().enumerate().filter(|(_, &clear)| clear) {
        for i in row * hidden..(row + 1) * hidden {
            assert!((out[i] - wanted[i]).abs() <= 1e-5 * most, "row {row}");
        }
    }
    Ok(())
}

/// bf16 over given positions: no further from f32 than 1.5 times what transformers' bf16 is.
pub fn bf16_matches_transformers(name: &str, device: &Device) -> Result<()> {
    let fixture = Fixture::load(name, DType::BF16, device)?;
    let rms = |a: &[f64], b: &[f64]| {
        let sum: f64 = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum();
        (sum / a.len() as f64).sqrt()
    };
    let check = |case: &str, out: &Tensor| -> Result<()> {
        let (wanted, half) = (
            fixture.reference(case, "out")?,
            fixture.reference(case, "bf16")?,
        );
        let out = numbers(out)?;
        for (what, ours, theirs) in [
            ("greatest", error(&out, &wanted), error(&half, &wanted)),
            ("mean square", rms(&out, &wanted), rms(&half, &wanted)),
        ] {
            println!("{name}, {case}: {what} error {ours:.3e}, transformers {theirs:.3e}");
            assert!(
                ours <= 1.5 * theirs,
                "{name}, {case}: {what} error {ours:e}, transformers {theirs:e}"
            );
        }
        Ok(())
    };
    for case in ["below", "at", "whole", "chunk", "decode"] {
        let (out, _) = run(&fixture, case, Some(&fixture.positions(case)?))?;
        check(case, &out)?;
    }
    if fixture.config.num_hidden_layers > 1 {
        let mut cache = fixture.cache(1, 2, TOKENS)?;
        let positions = fixture.positions("whole")?;
        let output =
            fixture
                .layer(1)?
                .forward(&fixture.hidden("x1")?, &mut cache, 0, Some(&positions))?;
        check("shared", &output.hidden)?;
    }
    Ok(())
}

fn close(a: &Tensor, b: &Tensor, what: &str) -> Result<()> {
    let error = error(&numbers(a)?, &numbers(b)?);
    assert!(error <= 1e-5, "{what}: {error:e}");
    Ok(())
}

/// Prefill in chunks, token by token and several tokens at a time, and with scores in chunks of
/// rows, is the whole prefill.
pub fn chunks_are_the_whole(name: &str, device: &Device) -> Result<()> {
    let fixture = Fixture::load(name, DType::F32, device)?;
    let layer = fixture.layer(0)?;
    let x = fixture.hidden("x")?;
    let mut cache = fixture.cache(0, 2, TOKENS + 5)?;
    let whole = layer.forward(&x, &mut cache, 0, None)?;
    let top = fixture.config.index_topk;
    let same = |parts: &[DsaOutput], what: &str| -> Result<()> {
        let hidden: Vec<_> = parts.iter().map(|part| part.hidden.clone()).collect();
        close(&Tensor::cat(&hidden, 1)?, &whole.hidden, what)?;
        let chosen = parts.iter().map(|part| {
            let tokens = part.hidden.dims()[1];
            part.positions.reshape((2, tokens, top))
        });
        let chosen = Tensor::cat(&chosen.collect::<Result<Vec<_>>>()?, 1)?;
        assert_eq!(
            chosen.flatten_all()?.to_vec1::<u32>()?,
            whole.positions.flatten_all()?.to_vec1::<u32>()?,
            "{what}"
        );
        Ok(())
    };
    for chunk in [1, 3, 8, 24, 36, 71] {
        for sequence in 0..2 {
            cache.reset(sequence)?;
        }
        let mut parts = Vec::new();
        for first in (0..TOKENS).step_by(chunk) {
            let part = x.narrow(1, first, chunk.min(TOKENS - first))?;
            parts.push(layer.forward(&part, &mut cache, 0, None)?);
        }
        same(&parts, &format!("{name}, chunks of {chunk}"))?;
    }
    // Tokens that are taken back, as after a refused speculation.
    for sequence in 0..2 {
        cache.truncate(sequence, 30)?;
    }
    let rest = layer.forward(&x.narrow(1, 30, TOKENS - 30)?, &mut cache, 0, None)?;
    close(
        &rest.hidden,
        &whole.hidden.narrow(1, 30, TOKENS - 30)?,
        "truncated",
    )?;

    for budget in [TOKENS * 4, 1000, 5000] {
        let mut cache = fixture.cache(0, 2, TOKENS)?;
        let layer = layer.clone().with_score_budget(budget);
        let output = layer.forward(&x, &mut cache, 0, None)?;
        same(&[output], &format!("{name}, scores in {budget} bytes"))?;
    }
    let mut cache = fixture.cache(0, 2, TOKENS)?;
    let tight = layer.with_score_budget(TOKENS * 4 - 1);
    refused(
        tight.forward(&x, &mut cache, 0, None),
        &["budget is 287", "288"],
    );
    assert_eq!(cache.lengths(), [0, 0]);
    Ok(())
}

/// Sequences of different lengths in one batch are as each alone; prompts fill one sequence each.
pub fn ragged_batches(name: &str, device: &Device) -> Result<()> {
    let fixture = Fixture::load(name, DType::F32, device)?;
    let layer = fixture.layer(0)?;
    let x = fixture.hidden("x")?;
    let lengths = [3usize, 60, 17, 0];
    let token =
        |sequence: usize, at: usize, n: usize| x.narrow(0, sequence % 2, 1)?.narrow(1, at, n);
    let mut cache = fixture.cache(0, 4, TOKENS)?;
    for (sequence, &length) in lengths.iter().enumerate() {
        if length > 0 {
            layer.forward(&token(sequence, 0, length)?, &mut cache, sequence, None)?;
        }
    }
    for (step, n) in [(0, 1), (1, 2), (3, 1)] {
        let new: Vec<_> = (0..4)
            .map(|sequence| token(sequence, lengths[sequence] + step, n))
            .collect::<Result<_>>()?;
        let together = layer.forward(&Tensor::cat(&new, 0)?, &mut cache, 0, None)?;
        for (sequence, length) in lengths.iter().enumerate() {
            let mut alone = fixture.cache(0, 1, TOKENS)?;
            let length = length + step + n;
            let output = layer.forward(&token(sequence, 0, length)?, &mut alone, 0, None)?;
            close(
                &together.hidden.narrow(0, sequence, 1)?,
                &output.hidden.narrow(1, length - n, n)?,
                &format!("{name}, sequence {sequence}, step {step}"),
            )?;
        }
    }
    assert_eq!(cache.lengths(), [7, 64, 21, 4]);
    Ok(())
}

/// Prompts, chunks and decoding in one packed batch are as each sequence alone.
pub fn packed_batches(name: &str, device: &Device) -> Result<()> {
    let fixture = Fixture::load(name, DType::F32, device)?;
    let layer = fixture.layer(0)?;
    let x = fixture.hidden("x")?;
    let token = |sequence: usize, at: usize, n: usize| {
        x.narrow(0, sequence % 2, 1)?.narrow(1, at, n)?.squeeze(0)
    };
    for fp8 in [false, true] {
        let cache = |sequences| -> Result<DsaCache> {
            let cache = fixture.cache(0, sequences, TOKENS)?;
            if fp8 {
                cache.with_fp8_index_keys()
            } else {
                Ok(cache)
            }
        };
        let mut packed = cache(5)?;
        let mut lengths = [0usize; 4];
        // Sequences 1 to 4 of the cache.
        for tokens in [
            [30, 0, 7, 1],
            [1, 50, 1, 16],
            [3, 2, 0, 20],
            [2, 2, 2, 2],
            [0; 4],
        ] {
            let parts: Vec<Tensor> = (0..4)
                .map(|i| token(i, lengths[i], tokens[i]))
                .collect::<Result<_>>()?;
            let together =
                layer.forward_packed(&Tensor::cat(&parts, 0)?, &tokens, &mut packed, 1, None)?;
            let mut from = 0;
            for (i, (length, n)) in lengths.iter_mut().zip(tokens).enumerate() {
                *length += n;
                if n == 0 {
                    continue;
                }
                let mut alone = cache(1)?;
                let whole = token(i, 0, *length)?.unsqueeze(0)?;
                let output = layer.forward(&whole, &mut alone, 0, None)?;
                close(
                    &together.hidden.narrow(0, from, n)?,
                    &output.hidden.squeeze(0)?.narrow(0, *length - n, n)?,
                    &format!("{name}, sequence {i} of {length} tokens"),
                )?;
                from += n;
            }
            assert_eq!(packed.lengths()[1..], lengths);
        }
        assert_eq!(packed.lengths()[0], 0);
    }
    let mut cache = fixture.cache(0, 2, TOKENS)?;
    let mut run =
        |tokens: &[usize]| layer.forward_packed(&token(0, 0, 6)?, tokens, &mut cache, 0, None);
    refused(run(&[3, 2]), &["of 6 tokens", "[3, 2]"]);
    refused(run(&[usize::MAX, 7]), &["of 6 tokens"]);
    refused(run(&[3, 2, 1]), &["3 sequences from 0 on", "holds 2"]);
    refused(
        layer.forward_packed(&x, &[144], &mut cache, 0, None),
        &["[2, 72, 64]", "F32 [S, 64]"],
    );
    let mut half = DsaCache::new(&fixture.config, 0, 2, 20, DType::BF16, device)?;
    refused(
        layer.forward(&x.narrow(1, 0, 4)?, &mut half, 0, None),
        &["cache is BF16 with 576", "F32 with 576"],
    );
    refused(
        layer.forward(&x.narrow(1, 0, 4)?, &mut cache, usize::MAX, None),
        &["holds 2"],
    );
    Ok(())
}

/// Fp8 weights with a scale for each block, as the checkpoints hold them.
pub fn fp8_weights(device: &Device) -> Result<()> {
    let mut fixture = Fixture::load("deepseek_v32", DType::F32, device)?;
    let rng = &mut rng(3);
    let mut plain = fixture.tensors.clone();
    for name in ["q_b_proj", "kv_b_proj", "indexer.wq_b"] {
        let name = format!("model.layers.0.self_attn.{name}");
        let (out, inputs) = fixture.tensors[&format!("{name}.weight")].dims2()?;
        let data: Vec<f32> = (0..out * inputs).map(|_| normal(rng)).collect();
        let fp8 = tensor(&data, &[out, inputs], DType::F8E4M3, &Device::Cpu)?;
        let blocks = (out.div_ceil(128), inputs.div_ceil(128));
        let scales: Vec<f32> = (0..blocks.0 * blocks.1)
            .map(|i| 0.05 + 0.01 * i as f32)
            .collect();
        let wide = fp8.to_dtype(DType::F32)?.to_vec2::<f32>()?;
        let mut product = Vec::new();
        for (r, row) in wide.iter().enumerate() {
            for (c, x) in row.iter().enumerate() {
                product.push(x * scales[r / 128 * blocks.1 + c / 128]);
            }
        }
        plain.insert(
            format!("{name}.weight"),
            Tensor::from_vec(product, (out, inputs), &Device::Cpu)?,
        );
        fixture.tensors.insert(format!("{name}.weight"), fp8);
        let scales = Tensor::from_vec(scales, blocks, &Device::Cpu)?;
        fixture
            .tensors
            .insert(format!("{name}.weight_scale_inv"), scales);
    }
    let x = fixture.hidden("x")?;
    let mut cache = fixture.cache(0, 2, TOKENS)?;
    let scaled = fixture.layer(0)?.forward(&x, &mut cache, 0, None)?;
    fixture.tensors = plain;
    let mut cache = fixture.cache(0, 2, TOKENS)?;
    let wanted = fixture.layer(0)?.forward(&x, &mut cache, 0, None)?;
    assert_eq!(numbers(&scaled.hidden)?, numbers(&wanted.hidden)?);
    Ok(())
}

/// Index keys in fp8 choose nearly the same positions, and decode as they prefill.
pub fn fp8_index_keys(name: &str, device: &Device) -> Result<()> {
    for ue8m0 in [false, true] {
        let mut fixture = Fixture::load(name, DType::F32, device)?;
        fixture.config.ue8m0 = ue8m0;
        let layer = fixture.layer(0)?;
        let x = fixture.hidden("x")?;
        let cache = || fixture.cache(0, 2, TOKENS)?.with_fp8_index_keys();
        let whole = layer.forward(&x, &mut cache()?, 0, None)?;
        let chosen = whole.positions.to_device(&Device::Cpu)?.to_vec2::<u32>()?;
        let wanted = fixture.chosen("whole")?;
        let (mut common, mut all) = (0, 0);
        for (own, wanted) in chosen.iter().zip(&wanted) {
            common += wanted.iter().filter(|p| own.contains(p)).count();
            all += wanted.len();
        }
        let share = common as f64 / all as f64;
        assert!(
            (0.95..1.0).contains(&share),
            "{name}: {share} of the positions"
        );

        let mut decoded = cache()?;
        layer.forward(&x.narrow(1, 0, PROMPT)?, &mut decoded, 0, None)?;
        for t in PROMPT..TOKENS {
            let token = layer.forward(&x.narrow(1, t, 1)?, &mut decoded, 0, None)?;
            close(
                &token.hidden,
                &whole.hidden.narrow(1, t, 1)?,
                &format!("{name}, token {t}"),
            )?;
        }
    }
    Ok(())
}

/// The numbers of a tensor, none of which two results may differ in.
fn same_bits(a: &Tensor, b: &Tensor, what: &str) -> Result<()> {
    assert_eq!(a.dims(), b.dims(), "{what}");
    assert_eq!(numbers(a)?, numbers(b)?, "{what}");
    Ok(())
}

fn same_positions(a: &Tensor, b: &Tensor, what: &str) -> Result<()> {
    assert_eq!(a.to_vec2::<u32>()?, b.to_vec2::<u32>()?, "{what}");
    Ok(())
}

/// A captured step gives the bits of the step itself, from the first token on and past `index_topk`, also after the
/// cache was changed in between.
pub fn decode_graphs(name: &str, dtype: DType, device: &Device) -> Result<()> {
    let fixture = Fixture::load(name, dtype, device)?;
    let layer = fixture.layer(0)?;
    let x = fixture.hidden("x")?;
    for (fp8, tokens) in [(false, 1), (true, 1), (false, 3)] {
        let cache = || {
            let cache = fixture.cache(0, 4, TOKENS)?;
            if fp8 {
                cache.with_fp8_index_keys()
            } else {
                Ok(cache)
            }
        };
        let (mut plain, mut captured): (DsaCache, DsaCache) = (cache()?, cache()?);
        let mut graph = DecodeGraph::new(&layer, &mut captured, 1, 2, tokens)?;
        assert_eq!(captured.lengths(), [0; 4]);
        let mut step = |at: [usize; 2], captured: &mut DsaCache, plain: &mut DsaCache| {
            let part = |i: usize| x.narrow(0, i, 1)?.narrow(1, at[i], tokens);
            let part = Tensor::cat(&[part(0)?, part(1)?], 0)?;
            let what = format!("{name}, {dtype:?}, fp8 {fp8}, tokens {tokens}, at {at:?}");
            let wanted = layer.forward(&part, plain, 1, None)?;
            let got = graph.step(&part, captured)?;
            same_bits(&got, &wanted.hidden, &what)?;
            same_positions(&graph.positions()?, &wanted.positions, &what)?;
            assert_eq!(captured.lengths(), plain.lengths(), "{what}");
            Ok::<(), candle_core::Error>(())
        };
        // Past index_topk, token by token.
        for t in (0..TOKENS / tokens).map(|t| t * tokens) {
            step([t, t], &mut captured, &mut plain)?;
        }
        // Lengths of their own: one is shortened, the other begins anew behind a prompt.
        for cache in [&mut captured, &mut plain] {
            cache.truncate(1, 30)?;
            cache.reset(2)?;
            layer.forward(&x.narrow(0, 1, 1)?.narrow(1, 0, 11)?, cache, 2, None)?;
        }
        for t in (0..30 / tokens).map(|t| t * tokens) {
            step([30 + t, 11 + t], &mut captured, &mut plain)?;
        }
        assert_eq!(captured.lengths()[0], 0);
        // A full cache refuses, and stays as it is.
        for cache in [&mut captured, &mut plain] {
            cache.set_length(1, TOKENS)?;
        }
        let lengths = captured.lengths().to_vec();
        let part = x.narrow(1, 0, tokens)?;
        refused(graph.step(&part, &mut captured), &["room for 72"]);
        assert_eq!(captured.lengths(), lengths);
        refused(graph.step(&part, &mut plain), &["not the one"]);
        refused(
            graph.step(&part.narrow(2, 0, 8)?, &mut captured),
            &["hidden states are", "is needed"],
        );
        // Other index keys behind the same latents.
        let mut captured = captured.with_fp8_index_keys()?;
        refused(graph.step(&part, &mut captured), &["not the one"]);
    }
    Ok(())
}

/// Steps whose lengths lie on the device, through layers that share positions, are those of `forward`; a
/// sequence that rests or is full sees nothing and writes nothing.
pub fn decodes_on_device(device: &Device) -> Result<()> {
    let fixture = Fixture::load("glm_moe_dsa", DType::F32, device)?;
    let layers = [fixture.layer(0)?, fixture.layer(1)?];
    let caches =
        || -> Result<[DsaCache; 2]> { Ok([fixture.cache(0, 2, 40)?, fixture.cache(1, 2, 40)?]) };
    let (mut plain, mut own) = (caches()?, caches()?);
    let xs = [fixture.hidden("x")?, fixture.hidden("x1")?];
    let hidden = fixture.config.hidden_size;
    let out = Tensor::zeros((2, hidden), DType::F32, device)?;
    let mut buffers = DecodeBuffers::new(&layers[0], 2, 1, 40)?;
    let part = |layer: usize, t: usize| xs[layer].narrow(1, t, 1)?.squeeze(1)?.contiguous();
    // Of nothing attended to there is the bias alone.
    let bias = &fixture.tensors["model.layers.0.self_attn.o_proj.bias"];
    let nothing = numbers(&Tensor::stack(&[bias, bias], 0)?)?;
    // No length is set: all rest.
    buffers.advance()?;
    refused(
        layers[1].decode_into(&part(1, 0)?, &mut own[1], 0, &mut buffers, &out),
        &["no layer before it"],
    );
    layers[0].decode_into(&part(0, 0)?, &mut own[0], 0, &mut buffers, &out)?;
    assert_eq!(numbers(&out)?, nothing);
    assert!(buffers
        .positions()?
        .to_vec2::<u32>()?
        .concat()
        .iter()
        .all(|&p| p == NONE));

    buffers.set_lengths(&[0, 0])?;
    for t in 0..40 {
        buffers.advance()?;
        let mut positions = None;
        for layer in 0..2 {
            let x = part(layer, t)?;
            layers[layer].decode_into(&x, &mut own[layer], 0, &mut buffers, &out)?;
            let wanted = layers[layer].forward(
                &x.unsqueeze(1)?,
                &mut plain[layer],
                0,
                positions.as_ref(),
            )?;
            let what = format!("layer {layer}, token {t}");
            same_bits(&out, &wanted.hidden.squeeze(1)?, &what)?;
            same_positions(&buffers.positions()?, &wanted.positions, &what)?;
            positions = Some(wanted.positions);
        }
    }
    // Both are full.
    buffers.advance()?;
    layers[0].decode_into(&part(0, 0)?, &mut own[0], 0, &mut buffers, &out)?;
    assert_eq!(numbers(&out)?, nothing);
    own[0].set_length(0, 40)?;
    own[0].set_length(1, 40)?;
    let x = part(0, 41)?;
    for cache in [&mut own[0], &mut plain[0]] {
        cache.truncate(0, 39)?;
        cache.truncate(1, 20)?;
    }
    let x = x.unsqueeze(1)?;
    let [a, b] = [&mut own[0], &mut plain[0]].map(|cache| layers[0].forward(&x, cache, 0, None));
    same_bits(
        &a?.hidden,
        &b?.hidden,
        "what the steps have left in the cache",
    )?;

    refused(buffers.set_lengths(&[1]), &["1 lengths", "2 of up to 40"]);
    refused(buffers.set_lengths(&[1, 41]), &["up to 41"]);
    refused(
        layers[0].decode_into(&part(0, 0)?, &mut own[0], 1, &mut buffers, &out),
        &["2 sequences from 1 on", "holds 2"],
    );
    let mut small = fixture.cache(0, 2, 20)?;
    refused(
        layers[0].decode_into(&part(0, 0)?, &mut small, 0, &mut buffers, &out),
        &["come to 40", "room for 20"],
    );
    refused(
        layers[0].decode_into(&xs[0], &mut own[0], 0, &mut buffers, &out),
        &["the hidden states are", "[2, 64]"],
    );
    refused(
        layers[0].decode_into(&out, &mut own[0], 0, &mut buffers, &out),
        &["storage of the hidden states"],
    );
    refused(
        DecodeBuffers::new(&layers[0], 0, 1, 40),
        &["at least 1 of each"],
    );
    refused(
        DecodeGraph::new(&layers[1], &mut own[1], 0, 2, 1),
        &["no indexer", "decode_into"],
    );
    Ok(())
}

/// On the CPU there is no such step.
pub fn decoding_refusals() -> Result<()> {
    let fixture = Fixture::load("glm_moe_dsa", DType::F32, &Device::Cpu)?;
    let layer = fixture.layer(0)?;
    refused(
        DecodeBuffers::new(&layer, 1, 1, 8),
        &["on Cpu", "forward serves others"],
    );
    refused(
        DecodeGraph::new(&layer, &mut fixture.cache(0, 1, 8)?, 0, 1, 1),
        &["on Cpu"],
    );
    let mut cache = fixture.cache(0, 2, 8)?;
    cache.set_length(1, 8)?;
    assert_eq!(cache.lengths(), [0, 8]);
    refused(cache.set_length(1, 9), &["length is 9", "room for 8"]);
    refused(cache.set_length(2, 0), &["sequence is 2", "holds 2"]);
    Ok(())
}

pub fn layer_refusals(device: &Device) -> Result<()> {
    let mut fixture = Fixture::load("glm_moe_dsa", DType::F32, device)?;
    let layer = fixture.layer(0)?;
    let x = fixture.hidden("x")?;
    let cache = &mut fixture.cache(0, 2, 20)?;
    let mut run =
        |x: &Tensor, first, positions: Option<&Tensor>| layer.forward(x, cache, first, positions);
    refused(run(&x, 0, None), &["comes to 72 tokens", "room for 20"]);
    refused(
        run(&x.narrow(1, 0, 4)?, 1, None),
        &["2 sequences from 1 on", "holds 2"],
    );
    refused(
        run(&x.narrow(2, 0, 32)?, 0, None),
        &["[2, 72, 32]", "[B, n, 64]"],
    );
    refused(
        run(&x.to_dtype(DType::BF16)?, 0, None),
        &["BF16", "F32 [B, n, 64]"],
    );
    refused(run(&x.squeeze(0)?.flatten(0, 1)?, 0, None), &["[144, 64]"]);
    let short = Tensor::zeros((2, 16), DType::U32, device)?;
    refused(
        run(&x.narrow(1, 0, 4)?, 0, Some(&short)),
        &["positions are U32 [2, 16]", "[8, 16]"],
    );
    assert_eq!(cache.lengths(), [0, 0]);
    let mut other = fixture.cache(1, 2, 20)?;
    refused(
        layer.forward(&x.narrow(1, 0, 4)?, &mut other, 0, None),
        &["indexer type differs"],
    );
    // Of a model whose indexer or whose RoPE is of another width.
    let mut config = fixture.config.clone();
    config.index_head_dim += 8;
    let mut wide = DsaCache::new(&config, 0, 2, 20, DType::F32, device)?;
    refused(
        layer.forward(&x.narrow(1, 0, 4)?, &mut wide, 0, None),
        &["index keys are F32 with", "numbers a token"],
    );
    config.qk_rope_head_dim += 2;
    let vb = VarBuilder::from_tensors(fixture.tensors.clone(), DType::F32, device);
    let load = |config: &DsaConfig, rope: &Rope| {
        DsaAttention::load(config, 0, rope, vb.pp("model.layers.0.self_attn"))
    };
    let rope = Rope::new(&config, 8, device)?;
    refused(
        load(&fixture.config, &rope),
        &["RoPE table is of", "are needed"],
    );
    config.qk_rope_head_dim = config.index_head_dim + 2;
    refused(
        load(&config, &rope),
        &["qk_rope_head_dim is", "even number"],
    );
    refused(fixture.cache(2, 1, 8), &["layer is 2", "has 2"]);
    refused(fixture.cache(0, 1, 0), &["capacity is 0"]);
    refused(fixture.cache(0, 1, 20_000), &["capacity is 20000", "10240"]);
    refused(cache.truncate(0, 5), &["has 0 tokens", "5"]);
    refused(cache.reset(2), &["sequence is 2", "holds 2"]);
    refused(
        Rope::new(&fixture.config, 20_000, device),
        &["20000 positions", "10240"],
    );
    let nothing = layer.forward(&x.narrow(1, 0, 0)?, cache, 0, None)?;
    assert_eq!(nothing.hidden.dims(), [2, 0, 64]);
    fixture
        .tensors
        .remove("model.layers.0.self_attn.indexer.k_norm.bias");
    refused(fixture.layer(0), &["k_norm.bias"]);
    Ok(())
}
