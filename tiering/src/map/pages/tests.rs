//! Tests folding against a model that keeps one entry per block.

use super::*;
use proptest::prelude::*;

type Cell = Option<Option<(u64, u32, u32, u32, u8)>>; // None: never assigned; Some(None): hole

fn cells(runs: &[Run]) -> Vec<Cell> {
    let mut cells = vec![None; 256];
    for run in runs {
        for block in run.first..=run.last {
            let within = run.within.wrapping_add(block - run.first);
            let place = (run.segment, run.frame_index, run.offset, run.sealed_bytes, within);
            cells[usize::from(block)] = Some(run.is_mapped().then_some(place));
        }
    }
    cells
}

fn is_sorted(runs: &[Run]) -> bool {
    runs.iter().all(|run| run.first <= run.last)
        && runs.windows(2).all(|pair| pair[0].last < pair[1].first)
}

prop_compose! {
    fn any_run()(first in any::<u8>(), length in 0u8..40, segment in 0u64..6, frame_index in 0u32..9,
                 offset in prop::sample::select(vec![0u32, 4096, 7777, u32::MAX]),
                 sealed_bytes in 1u32..70_000, within in 0u8..16) -> Run {
        let last = first.saturating_add(length);
        if segment == 0 {
            Run::hole(first, last)
        } else {
            Run { segment, frame_index, offset, sealed_bytes, first, last, within }
        }
    }
}

prop_compose! {
    fn any_runs()(mut runs in prop::collection::vec(any_run(), 0..40)) -> Vec<Run> {
        runs.sort_by_key(|run| run.first);
        let mut kept: Vec<Run> = Vec::new();
        for run in runs {
            if kept.last().is_none_or(|before| before.last < run.first) {
                kept.push(run);
            }
        }
        normalize(&mut kept);
        kept
    }
}

fn any_kind() -> impl Strategy<Value = OperandKind> {
    prop_oneof![
        5 => Just(OperandKind::Delta { keeps: false }),
        2 => Just(OperandKind::Delta { keeps: true }),
        1 => Just(OperandKind::Image { copy: Lsn::NONE }),
    ]
}

prop_compose! {
    fn any_operands()(list in prop::collection::vec((any_runs(), any_kind()), 0..8),
                      steps in prop::collection::vec(0u64..3, 8)) -> Vec<Operand> {
        let mut lsn = 0;
        list.into_iter().zip(steps).map(|((runs, kind), step)| {
            lsn += step + 1;
            Operand { lsn: Lsn(lsn), kind, runs }
        }).collect()
    }
}

proptest! {
    #[test]
    fn folding_equals_assigning_block_by_block(operands in any_operands(), cut in 0u64..12) {
        let mut model = vec![None; 256];
        for operand in &operands {
            if operand.is_image() {
                model = vec![None; 256];
            }
            if operand.lsn.0 <= cut {
                continue;
            }
            for (cell, new) in model.iter_mut().zip(cells(&operand.runs)) {
                if new.is_some() {
                    *cell = new;
                }
            }
        }
        let page = fold(&operands, Lsn(cut));
        prop_assert!(is_sorted(&page.runs));
        prop_assert_eq!(cells(&page.runs), model);
        prop_assert_eq!(page.operand_count as usize, operands.len());
        prop_assert_eq!(page.has_hidden, operands.iter().any(|operand| operand.lsn.0 <= cut));
    }

    #[test]
    fn assigning_twice_changes_nothing(older in any_runs(), newer in any_runs()) {
        let once = assign(&older, &newer);
        prop_assert!(is_sorted(&once));
        prop_assert_eq!(assign(&once, &newer), once);
    }

    #[test]
    fn replaced_blocks_are_counted_once(older in any_runs(), newer in any_runs()) {
        let mut counted = std::collections::BTreeMap::new();
        for_each_replaced(&older, &newer, |run| {
            *counted.entry(run.segment).or_insert(0) += run.count();
        });
        let mut model = std::collections::BTreeMap::new();
        for (old, new) in cells(&older).into_iter().zip(cells(&newer)) {
            if let (Some(Some(place)), Some(_)) = (old, new) {
                *model.entry(place.0).or_insert(0) += 1;
            }
        }
        prop_assert_eq!(counted, model);
    }

    #[test]
    fn encoded_operands_decode_to_the_same(runs in any_runs(), lsn in 1u64.., kind in any_kind(), copy: u64) {
        let kind = match kind {
            OperandKind::Image { .. } => OperandKind::Image { copy: Lsn(copy % lsn) },
            delta => delta,
        };
        let mut bytes = Vec::new();
        encode(Lsn(lsn), kind, &runs, &mut bytes);
        let operand = decode(&bytes).unwrap();
        prop_assert_eq!(operand, Operand { lsn: Lsn(lsn), kind, runs });
        for end in 0..bytes.len() {
            prop_assert!(decode(&bytes[..end]).is_err());
        }
        bytes.push(0);
        prop_assert!(decode(&bytes).is_err());
    }

    #[test]
    fn decoding_anything_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        for prefix in [
            &[][..],
            &[OPERAND_VERSION, KIND_DELTA, 9],
            &[OPERAND_VERSION, KIND_IMAGE, 1, 200, 1],
            &[OPERAND_VERSION_KEEPING, KIND_KEEPING_DELTA, 9],
            &[OPERAND_VERSION_KEEPING, KIND_IMAGE_AFTER_COPY, 9],
        ] {
            let mut all = prefix.to_vec();
            all.extend_from_slice(&bytes);
            if let Ok(operand) = decode(&all) {
                prop_assert!(is_sorted(&operand.runs));
            }
        }
    }

    #[test]
    fn the_runs_between_two_blocks_are_the_cells_between_them(runs in any_runs(), a: u8, b: u8) {
        let (first, last) = (a.min(b), a.max(b));
        let page = Page { runs: runs.clone().into_boxed_slice(), ..Page::default() };
        let found: Vec<Run> = page.runs_between(first, last).collect();
        let mut model = cells(&runs);
        model[..usize::from(first)].fill(None);
        model[usize::from(last) + 1..].fill(None);
        prop_assert_eq!(cells(&found), model);
    }
}

proptest! {
    /// The counted blocks are those of the folded page and those that keeping operands have
    /// replaced since the newest image.
    #[test]
    fn kept_blocks_are_counted_until_the_next_image(operands in any_operands()) {
        let mut now: Vec<Cell> = vec![None; 256];
        let mut kept = 0u32;
        for operand in &operands {
            if operand.is_image() {
                (now, kept) = (vec![None; 256], 0);
            }
            for (cell, new) in now.iter_mut().zip(cells(&operand.runs)) {
                let is_kept = operand.kind == OperandKind::Delta { keeps: true };
                if new.is_some() {
                    kept += u32::from(is_kept && matches!(cell, Some(Some(_))));
                    *cell = new;
                }
            }
        }
        let mapped = now.iter().filter(|cell| matches!(cell, Some(Some(_)))).count();
        let found: u32 = counted(&operands).iter().map(Run::count).sum();
        prop_assert_eq!(found, kept + u32::try_from(mapped).unwrap());
    }

    #[test]
    fn changed_blocks_are_those_moved_or_removed(older in any_runs(), newer in any_runs()) {
        let of = |runs: &[Run]| cells(runs).into_iter().map(|cell| {
            cell.flatten().map(|(segment, frame, _, _, within)| (segment, frame, within))
        }).collect::<Vec<_>>();
        let mut found = [None; 256];
        for (first, last, is_hole) in changed(&older, &newer) {
            found[usize::from(first)..=usize::from(last)].fill(Some(is_hole));
        }
        for ((old, new), found) in of(&older).into_iter().zip(of(&newer)).zip(found) {
            prop_assert_eq!(found, (old != new).then_some(new.is_none()));
        }
    }

    #[test]
    fn difference_lists_blocks_stored_elsewhere(runs in any_runs(), other in any_runs()) {
        // Segment and index alone identify the place of a frame.
        let of = |runs: &[Run]| cells(runs).into_iter().map(|cell| {
            cell.flatten().map(|(segment, frame, _, _, within)| (segment, frame, within))
        }).collect::<Vec<_>>();
        let model: Vec<_> = of(&runs).into_iter().zip(of(&other))
            .map(|(one, other)| one.filter(|_| one != other)).collect();
        let found = difference(&runs, &other);
        prop_assert!(is_sorted(&found));
        prop_assert_eq!(of(&found), model);
    }
}

fn mapped(first: u8, last: u8, frame_index: u32, offset: u32, within: u8) -> Run {
    Run { segment: 3, frame_index, offset, sealed_bytes: 1000, first, last, within }
}

#[test]
fn a_sequential_page_takes_few_bytes() {
    let runs: Vec<Run> = (0..32u8)
        .map(|frame| {
            mapped(
                frame * 8,
                frame * 8 + 7,
                40 + u32::from(frame),
                512 + 1000 * u32::from(frame),
                0,
            )
        })
        .collect();
    let mut bytes = Vec::new();
    encode(Lsn(1_000_000), OperandKind::Image { copy: Lsn::NONE }, &runs, &mut bytes);
    assert!(bytes.len() < 32 * 4 + 24, "{} bytes", bytes.len());
    assert_eq!(decode(&bytes).unwrap().runs, runs);
}

#[test]
fn pieces_of_one_frame_join_again() {
    let whole = mapped(10, 25, 7, 64, 0);
    let hole = Run::hole(14, 15);
    let cut = assign(&[whole], &[hole]);
    assert_eq!(cut, vec![mapped(10, 13, 7, 64, 0), hole, mapped(16, 25, 7, 64, 6)]);
    assert_eq!(assign(&cut, &[mapped(14, 15, 7, 64, 4)]), vec![whole]);
}

#[test]
fn differences_of_any_size_read_back() {
    for value in [0, 1, 17, 127, 128, 300, u64::from(u32::MAX), u64::MAX - 1, u64::MAX] {
        assert_eq!(unzigzag(zigzag(value, 17), 17), value);
    }
}
