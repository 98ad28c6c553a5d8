//! Gradients through indexing, held against the model: what is read gets its gradient as often as
//! it was read, what is overwritten gets none, and a value gets the gradients of the places that it
//! won, summed over the dimensions along which it was repeated.

use super::{Case, compare, model::Selection, numbers, sample::Dice, tensor};
use anymesh_core::{DType, Error, Index, Result, Tensor};

/// A gradient, zeros where nothing depends on the tensor.
async fn of(
    result: &Tensor,
    seed: &Tensor,
    x: &Tensor,
    also: Option<&Tensor>,
) -> Result<(Vec<i64>, Vec<i64>)> {
    let grads = result.backward_with(seed)?;
    let read = async |x: &Tensor| match grads.get(x)? {
        Some(gradient) if gradient.shape() == x.shape() => numbers(&gradient).await,
        Some(gradient) => Err(Error::shape(
            "backward",
            [&gradient, x],
            format!("{} for {}", gradient.type_string(), x.type_string()),
        )),
        None => Ok(vec![0; x.numel()]),
    };
    Ok((
        read(x).await?,
        if let Some(also) = also {
            read(also).await?
        } else {
            vec![]
        },
    ))
}

impl Case {
    fn seed(&self, dice: &mut Dice, shape: &[usize]) -> Result<(Vec<i64>, Tensor)> {
        let seed: Vec<i64> = (0..shape.iter().product::<usize>() as i64)
            .map(|i| i + 1)
            .collect();
        let plain = tensor(&seed, shape, DType::F32, self.mesh.device(0))?;
        Ok((seed, self.place(dice, plain)?))
    }

    pub(super) async fn gradient_of_get(
        &self,
        dice: &mut Dice,
        x: &Tensor,
        index: &[Index],
        selection: &Selection,
    ) -> Result<(), String> {
        let words = |e: Error| format!("gradient of get: {e}");
        let (numbers, seed) = self.seed(dice, &selection.shape).map_err(words)?;
        let mut expected = vec![0; x.numel()];
        for (place, g) in selection.places.iter().zip(&numbers) {
            expected[*place] += g;
        }
        let x = x.require_grad().map_err(words)?;
        let got = x.get_async(index).await.map_err(words)?;
        let (gradient, _) = of(&got, &seed, &x, None).await.map_err(words)?;
        compare(
            "the gradient of get",
            &self.shape,
            &expected,
            (&self.shape, gradient),
        )
    }

    /// Of a set, or of an accumulation; `from` has for each selected element the element of the
    /// value that goes there.
    pub(super) async fn gradient_of_set(
        &self,
        dice: &mut Dice,
        (x, value): (&Tensor, &Tensor),
        index: &[Index],
        (places, from): (&[usize], &[usize]),
        add: bool,
    ) -> Result<(), String> {
        let what = if add { "add_at" } else { "set" };
        let words = |e: Error| {
            format!(
                "gradient of {what} with a value of shape {}: {e}",
                value.shape()
            )
        };
        let (numbers, seed) = self.seed(dice, &self.shape).map_err(words)?;
        let (mut for_x, mut for_value) = (numbers.clone(), vec![0; value.numel()]);
        for (k, (place, source)) in places.iter().zip(from).enumerate() {
            if add || !places[k + 1..].contains(place) {
                for_value[*source] += numbers[*place];
            }
            if !add {
                for_x[*place] = 0;
            }
        }
        let (x, value) = (
            x.require_grad().map_err(words)?,
            value.require_grad().map_err(words)?,
        );
        let result = if add {
            x.add_at_async(index, &value).await
        } else {
            x.set_async(index, &value).await
        }
        .map_err(words)?;
        let (of_x, of_value) = of(&result, &seed, &x, Some(&value)).await.map_err(words)?;
        compare(
            &format!("the gradient of what was {what}"),
            &self.shape,
            &for_x,
            (&self.shape, of_x),
        )?;
        compare(
            &format!("the gradient of the value of {what}"),
            value.dims(),
            &for_value,
            (value.dims(), of_value),
        )
    }
}
