import com.fasterxml.jackson.databind.ObjectReader;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StoreQueryParameters;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.QueryableStoreTypes;

/** One balance per account, in Kafka Streams' own store. Arguments: brokers, topic, number of commits, folder, group. */
public final class Streams {
    private static final String STORE = "balances";

    public static void main(String[] arguments) throws Exception {
        Peer.endWithParent();
        long wanted = Long.parseLong(arguments[2]);
        Properties settings = new Properties();
        settings.put("bootstrap.servers", arguments[0]);
        settings.put("application.id", arguments[4]);
        settings.put("state.dir", arguments[3] + "/streams");
        settings.put("processing.guarantee", "exactly_once_v2");
        settings.put("num.stream.threads", "2");
        settings.put("statestore.cache.max.bytes", "104857600");
        settings.put("replication.factor", "1");
        settings.put("auto.offset.reset", "earliest");
        settings.put("consumer.max.poll.records", "5000");
        settings.put("consumer.max.partition.fetch.bytes", "8388608");
        settings.put("producer.linger.ms", "20");
        settings.put("producer.compression.type", "lz4");

        ObjectReader commits = Peer.commits();
        AtomicLong count = new AtomicLong();
        AtomicLong last = new AtomicLong();
        CountDownLatch done = new CountDownLatch(1);
        StreamsBuilder builder = new StreamsBuilder();
        // openings have no key, and those are left out
        builder.stream(arguments[1], Consumed.with(Serdes.String(), Serdes.ByteArray()))
                .groupByKey()
                .aggregate(
                        () -> 0L,
                        (stream, value, cents) -> {
                            Peer.begin();
                            try {
                                cents += commits.<Peer.Commit>readValue(value).change();
                            } catch (IOException unreadable) {
                                throw new UncheckedIOException(unreadable);
                            }
                            if (count.incrementAndGet() == wanted) {
                                last.set(System.nanoTime());
                                done.countDown();
                            }
                            return cents;
                        },
                        Materialized.<String, Long, KeyValueStore<Bytes, byte[]>>as(STORE)
                                .withKeySerde(Serdes.String())
                                .withValueSerde(Serdes.Long()));
        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        streams.setUncaughtExceptionHandler(error -> {
            error.printStackTrace();
            Runtime.getRuntime().halt(1);
            return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
        streams.start();
        done.await();
        Map<String, long[]> rows = new HashMap<>();
        try (var all = streams.store(
                        StoreQueryParameters.fromNameAndType(STORE, QueryableStoreTypes.<String, Long>keyValueStore()))
                .all()) {
            all.forEachRemaining(row -> rows.put(row.key.substring(row.key.indexOf('/') + 1), new long[] {0, row.value}));
        }
        Peer.tell(count.get(), last.get(), rows, Map.of());
        streams.close(Duration.ofSeconds(20));
        System.exit(0);
    }
}
