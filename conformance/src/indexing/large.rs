//! Indexing of a tensor with more than 2^31 elements.

use anymesh_core::{DType, Device, Error, Result, Tensor, i};

/// Reads and writes on both sides of element 2^31, by every kind of index. Needs about 12 GiB on
/// the device, and 24 GiB on the CPU, which adds small numbers as wide ones.
pub async fn large(device: &Device) -> Result<(), String> {
    check(device).await.map_err(|e| e.to_string())
}

async fn check(device: &Device) -> Result<()> {
    let edge = 1i64 << 31;
    let n = edge + 100;
    let x = Tensor::zeros([n as usize], DType::U8, device)?;
    let x = x.set_async(i![-3], 7).await?;
    let x = x.set_async(i![edge - 2..edge + 5;3], 9).await?;
    let around = async |x: &Tensor| {
        x.get_async(i![edge - 3..edge + 6])
            .await?
            .to_vec_async::<u8>()
            .await
    };
    expect(
        "a slice that was set",
        around(&x).await?,
        vec![0, 9, 0, 0, 9, 0, 0, 9, 0],
    )?;
    expect(
        "slices on their way back",
        x.get_async(i![..edge;-1])
            .await?
            .get_async(i![-5..;2])
            .await?
            .to_vec_async::<u8>()
            .await?,
        vec![0, 0, 9],
    )?;
    expect(
        "one element",
        x.get_async(i![n - 3]).await?.to_vec_async::<u8>().await?,
        vec![7],
    )?;

    let places = Tensor::from_slice(&[n - 1, edge, -1, 5], [4], device)?;
    let values = Tensor::from_slice(&[1u8, 2, 3, 4], [4], device)?;
    let x = x.set_async(i![&places], &values).await?;
    expect(
        "places that were set",
        x.get_async(i![&places]).await?.to_vec_async::<u8>().await?,
        vec![3, 2, 3, 4],
    )?;
    expect(
        "their neighbours",
        around(&x).await?,
        vec![0, 9, 0, 2, 9, 0, 0, 9, 0],
    )?;

    let mask = x.gt(0)?;
    expect(
        "where a mask holds",
        x.get_async(i![&mask]).await?.to_vec_async::<u8>().await?,
        vec![4, 9, 2, 9, 9, 7, 3],
    )?;
    let x = x.set_async(i![&mask], 1).await?;
    expect(
        "what a mask filled",
        around(&x).await?,
        vec![0, 1, 0, 1, 1, 0, 0, 1, 0],
    )?;
    let past = Tensor::from_slice(&[n], [1], device)?;
    let read = async || x.get_async(i![&past]).await?.to_vec_async::<u8>().await;
    match read().await {
        Err(Error::IndexOutOfRange { .. }) => {}
        other => {
            return Err(Error::argument(
                "get",
                "index",
                format!("a place past the end gave {other:?}"),
            ));
        }
    }
    let x = x.add_at_async(i![&places], &values).await?;
    expect(
        "places that were added to",
        x.get_async(i![&places]).await?.to_vec_async::<u8>().await?,
        vec![5, 3, 5, 5],
    )
}

fn expect(what: &str, got: Vec<u8>, expected: Vec<u8>) -> Result<()> {
    if got == expected {
        Ok(())
    } else {
        Err(Error::argument(
            "get",
            "index",
            format!("{what}: {got:?}, expected {expected:?}"),
        ))
    }
}
